"""Forests in a transformer: what they compute is what rows compute, under either form of the mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gyre_traj import Packed, Row, pack_forests, pack_rows
from gyre_traj.errors import BadChoice
from gyre_traj.torch import block_mask, dense_mask, input_ids, position_ids, target_logprobs

VOCAB, WIDTH, HEADS = 5, 16, 2
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q, k, v [1, heads, n, d]
Logits = dict[tuple[int, int], torch.Tensor]  # that predict the token at (trajectory, place)
few = settings(max_examples=25, deadline=None)


class Tiny(torch.nn.Module):  # type: ignore[misc]
    """A causal transformer of two layers with rotary positions, in float64; attention is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.attend = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64) for _ in range(2))
        self.mix = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCAB, dtype=torch.float64)

    def forward(self, ids: torch.Tensor, position: torch.Tensor, attention: Attention) -> torch.Tensor:
        """ids, position [n] -> logits [n, vocab]."""
        x = self.token(ids)
        for attend, mix in zip(self.attend, self.mix, strict=True):
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(0, 1) for part in attend(x).chunk(3, -1))
            mixed = attention(self.turn(q, position)[None], self.turn(k, position)[None], v[None])[0]
            x = x + torch.tanh(mix(mixed.transpose(0, 1).flatten(1)))
        return self.head(x)

    def turn(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of channels [heads, n, d] by an angle that grows with the position."""
        angle = position[:, None].double() / torch.tensor([1.0, 7.0, 30.0, 100.0], dtype=torch.float64)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


def under(mask: torch.Tensor) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        score = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
        return score.softmax(-1) @ v

    return attention


def dense(packed: Packed) -> Attention:
    return under(dense_mask(packed))


def blocks(packed: Packed) -> Attention:
    """As the kernels read a block mask: full blocks whole, partial ones token by token, the others not at all."""
    return under(allowed(block_mask(packed, block_size=4), packed.tokens))


def allowed(mask: BlockMask, n: int) -> torch.Tensor:
    (size, _), tokens = mask.BLOCK_SIZE, torch.arange(n)
    token_by_token = mask.mask_mod(torch.tensor(0), torch.tensor(0), tokens[:, None], tokens[None, :])
    out = torch.zeros(n, n, dtype=torch.bool)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for q, (count, order) in enumerate(zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], strict=True)):
        for k in order[:count].tolist():
            out[q * size : (q + 1) * size, k * size : (k + 1) * size] = True
    for q, (count, order) in enumerate(zip(mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0], strict=True)):
        for k in order[:count].tolist():
            here = slice(q * size, (q + 1) * size), slice(k * size, (k + 1) * size)
            out[here] = token_by_token[here]
    return out


def flex(packed: Packed) -> Attention:
    mask = block_mask(packed, block_size=4)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(out, torch.Tensor)
        return out

    return attention


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@st.composite
def trees(draw: st.DrawFn) -> list[Row]:
    """Rows of several executions that grow out of each other: branches of branches, shared prefixes, twins."""
    rows: list[Row] = []
    for number in range(draw(st.integers(1, 7))):
        above = draw(st.sampled_from(rows)).ids.tolist() if rows else []
        kept = above[: draw(st.integers(0, len(above)))]
        ids = kept + draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if len(kept) > 1 else 2, max_size=8))
        target = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 2, max_size=len(ids) - 2)), True]
        rows.append(
            Row(
                f"e{draw(st.integers(0, 2))}",
                number,
                ids,
                target,
                -np.ones(len(ids)),
                draw(st.sampled_from([0.25, 0.5, 1.0])),
                draw(st.sampled_from([-1.0, 0.5])),
                [draw(st.sampled_from([0.5, 1.0])) for _ in ids],
            )
        )
    return rows


def outcome(rows: list[Row], model: Tiny) -> tuple[Logits, list[torch.Tensor]]:
    """Row by row and without any of the package: logits that predict each (trajectory, place), and gradients."""
    logits: Logits = {}
    model.zero_grad()
    for row in rows:
        out = model(torch.from_numpy(row.ids.astype("int64")), torch.arange(len(row)), causal)
        for place in np.flatnonzero(row.target).tolist():
            predicting = out[place - 1]
            logits[row.trajectory, place] = predicting.detach()
            logprob = (predicting / row.temperature[place].item()).log_softmax(-1)[int(row.ids[place])]
            (-row.weight * row.advantage * logprob).backward(retain_graph=True)
    return logits, [p.grad for p in model.parameters() if p.grad is not None]


def packed_outcome(packs: list[Packed], model: Tiny, attention: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same of micro-steps: logits [m, vocab] of each, and gradients."""
    logits = []
    model.zero_grad()
    for packed in packs:
        out = model(input_ids(packed), position_ids(packed), attention(packed))
        arrays = packed.arrays()
        logits.append(out[arrays.source.astype("int64")].detach())
        logprobs = target_logprobs(out, packed, chunk=3)
        scale = torch.from_numpy(-arrays.weight * arrays.advantage).double()
        (scale * logprobs).sum().backward()
    return logits, [p.grad for p in model.parameters() if p.grad is not None]


@few
@given(trees(), st.integers(1, 40), st.sampled_from([pack_rows, pack_forests]), st.sampled_from([dense, blocks]))
def test_micro_steps_compute_what_rows_compute(rows: list[Row], budget: int, pack: Any, attention: Any) -> None:
    model = Tiny()
    expected, gradients = outcome(rows, model)
    packs = pack(rows, budget)
    got, packed_gradients = packed_outcome(packs, model, attention)
    same_logits(rows, packs, got, expected)
    torch.testing.assert_close(packed_gradients, gradients, atol=1e-10, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=6, deadline=None)
@given(trees(), st.integers(1, 40))
def test_flex_attention_computes_what_rows_compute(rows: list[Row], budget: int) -> None:
    """Forward alone: on CPUs it has no backward."""
    model = Tiny()
    expected, _ = outcome(rows, model)
    packs = pack_forests(rows, budget)
    with torch.no_grad():
        got = [model(input_ids(p), position_ids(p), flex(p))[p.arrays().source.astype("int64")] for p in packs]
    same_logits(rows, packs, got, expected)


def same_logits(rows: list[Row], packs: list[Packed], got: list[torch.Tensor], expected: Logits) -> None:
    places = {row.trajectory: np.flatnonzero(row.target).tolist() for row in rows}
    for packed, logits in zip(packs, got, strict=True):
        for trajectory, predicting in zip(packed.arrays().trajectory.tolist(), logits, strict=True):
            place = places[trajectory].pop(0)
            torch.testing.assert_close(predicting, expected[trajectory, place], atol=1e-10, rtol=0)
    assert not any(places.values())


@few
@given(trees(), st.integers(1, 60), st.integers(2, 9))
def test_both_masks_are_the_definition(rows: list[Row], budget: int, size: int) -> None:
    for packed in pack_forests(rows, budget):
        end = packed.arrays().end
        n = packed.tokens
        expected = torch.tensor([[j <= i < end[j] for j in range(n)] for i in range(n)])
        assert torch.equal(dense_mask(packed), expected)

        mask = block_mask(packed, block_size=size)
        assert torch.equal(allowed(mask, n), expected)
        theirs = create_block_mask(mask.mask_mod, None, None, n, n, device="cpu", BLOCK_SIZE=size)
        assert torch.equal(mask.to_dense(), theirs.to_dense())
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mask, name), getattr(theirs, name))
        assert torch.equal(mask.full_kv_indices, theirs.full_kv_indices)


def test_a_block_mask_never_makes_the_whole_mask() -> None:
    """At 60,000 tokens the dense mask would take 3.6 GB, and the blocks take 470²."""
    n = 30_000
    ids = np.arange(n) % 7
    rows = [Row("e", i, [*ids, 10 + i], [False] * n + [True], np.zeros(n + 1), 1.0, 1.0) for i in range(2)]
    (packed,) = pack_forests(
        [*rows, Row("f", 2, ids[::-1], [False] * (n - 1) + [True], np.zeros(n), 1.0, 1.0)], 2 * n + 2
    )
    mask = block_mask(packed)
    assert mask.kv_indices.shape == (1, 1, 469, 469)
    assert 70 < mask.sparsity() < 80  # two causal triangles of half the length


def test_a_block_size_below_one_is_refused() -> None:
    (packed,) = pack_rows([Row("e", 0, [1, 2], [False, True], [0, -1], 1.0, 1.0)], 2)
    with pytest.raises(BadChoice, match="block_size must be at least 1"):
        block_mask(packed, block_size=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_flex_attention_on_a_gpu() -> None:
    """Forward and backward, compiled, against the dense mask."""
    generator = np.random.default_rng(0)
    trunk = generator.integers(0, 9, 400)
    rows = []
    for number, shared in enumerate([0, 400, 250, 250, 90]):
        ids = np.concatenate([trunk[:shared], generator.integers(0, 9, 300)])
        rows.append(Row("e", number, ids, np.arange(len(ids)) == len(ids) - 1, np.zeros(len(ids)), 1.0, 1.0))
    (packed,) = pack_forests(rows, 10_000)
    q, k, v = (torch.randn(1, 2, packed.tokens, 32, device="cuda", requires_grad=True) for _ in range(3))
    mask = block_mask(packed, "cuda")
    found = []
    for out in (torch.compile(flex_attention)(q, k, v, block_mask=mask), under(dense_mask(packed, "cuda"))(q, k, v)):
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)
