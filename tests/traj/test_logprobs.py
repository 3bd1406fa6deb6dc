"""Log-probabilities of targets: their values, gradients and entropies, and how much of the logits is ever there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gyre_traj import Packed, Row, pack_forests
from gyre_traj.errors import BadRow
from gyre_traj.torch import target_logprobs

VOCAB = 11


@pytest.fixture
def packed() -> Packed:
    """A fork whose token predicts three targets, at three temperatures."""
    rows = [
        Row("e", 0, [1, 2, 3, 4], [False, False, True, True], [0, 0, -1, -1], 0.5, 1.0, [1, 1, 0.5, 0.5]),
        Row("e", 1, [1, 2, 5], [False, False, True], [0, 0, -1], 0.5, 1.0),
        Row("f", 2, [1, 2, 6, 7], [False, False, True, False], [0, 0, -1, 0], 0.5, 1.0, [1, 1, 2, 1]),
        Row("f", 3, [8, 9], [False, True], [0, -1], 0.5, 1.0),
    ]
    (one,) = pack_forests(rows, 20)
    return one


def plainly(packed: Packed, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = packed.arrays()
    x = logits[a.source.astype("int64")].double() / torch.from_numpy(a.temperature).double()[:, None]
    logp = x.log_softmax(-1)
    return logp[torch.arange(packed.targets), a.target.astype("int64")], -(logp.exp() * logp).sum(-1)


def test_the_transition_into_each_branch_is_included(packed: Packed) -> None:
    arrays = packed.arrays()
    branch = [(int(s), int(t)) for s, t in zip(arrays.source, arrays.target, strict=True)]
    assert [t for s, t in branch if arrays.ids[s] == 2] == [3, 5, 6]
    logits = torch.randn(packed.tokens, VOCAB)
    expected, _ = plainly(packed, logits)
    torch.testing.assert_close(target_logprobs(logits, packed), expected.float())
    torch.testing.assert_close(target_logprobs(logits[None], packed), expected.float())


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_gradients_are_those_of_the_plain_formula(packed: Packed, chunk: int, entropy: bool, hidden: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, 6 if hidden else VOCAB, dtype=torch.float64, requires_grad=True)
    states = torch.randn(packed.tokens, weight.shape[1], dtype=torch.float64, requires_grad=True)
    scale, slope = torch.randn(packed.targets, dtype=torch.float64), torch.randn(packed.targets, dtype=torch.float64)

    def head(rows: torch.Tensor) -> torch.Tensor:
        return rows @ weight.T

    logprobs, entropies = plainly(packed, head(states) if hidden else states)
    expected = (scale * logprobs).sum() + (slope * entropies).sum() * entropy
    inputs = (states, weight) if hidden else (states,)
    gradients = torch.autograd.grad(expected, inputs)

    if entropy:
        found, spread = target_logprobs(states, packed, head if hidden else None, chunk=chunk, entropy=True)
        got = (scale * found).sum() + (slope * spread).sum()
        torch.testing.assert_close(spread, entropies)
    else:
        got = (scale * target_logprobs(states, packed, head if hidden else None, chunk=chunk)).sum()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, inputs), gradients)


def test_half_precision_logits_are_widened_by_the_chunk(packed: Packed) -> None:
    logits = torch.randn(packed.tokens, VOCAB).bfloat16().requires_grad_()
    logprobs, entropies = target_logprobs(logits, packed, entropy=True)
    assert logprobs.dtype == entropies.dtype == torch.float32
    expected, spread = plainly(packed, logits)
    torch.testing.assert_close(logprobs, expected.float())
    torch.testing.assert_close(entropies, spread.float())
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_a_head_is_given_a_chunk_at_a_time_and_again_for_the_gradient(packed: Packed) -> None:
    sizes: list[int] = []
    weight = torch.randn(VOCAB, 4, requires_grad=True)

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ weight.T

    logprobs = target_logprobs(torch.randn(packed.tokens, 4), packed, head, chunk=2)
    assert sizes == [2, 2, 1]
    logprobs.sum().backward()
    assert sorted(sizes) == [1, 1, 2, 2, 2, 2]


def test_what_a_vocabulary_mask_forbids_costs_nothing(packed: Packed) -> None:
    """Logits of -inf beside the targets: no NaN in entropies or gradients."""
    logits = torch.randn(packed.tokens, VOCAB)
    logits[:, 0] = -torch.inf
    logits.requires_grad_()
    logprobs, entropies = target_logprobs(logits, packed, entropy=True)
    (logprobs.sum() + entropies.sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(entropies).all()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_micro_step_without_targets_stays_in_the_graph(packed: Packed, hidden: bool) -> None:
    empty = Packed(ids=b"", logprobs=b"", rows=(), executions=(), budget=1)
    states = torch.randn(0, VOCAB, requires_grad=True)
    logprobs = target_logprobs(states, empty, (lambda rows: rows * 2) if hidden else None)
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert states.grad is not None


def test_the_peak_is_a_chunks_and_not_the_whole() -> None:
    """1,000 targets of 2,000 ids are 8 MB in float32; a chunk of 10 is 0.08 MB."""
    n, vocab = 1001, 2000
    (packed,) = pack_forests([Row("e", 0, np.arange(n), [False] + [True] * (n - 1), np.zeros(n), 1.0, 1.0)], n)
    weight = torch.randn(vocab, 4, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        target_logprobs(torch.randn(n, 4), packed, lambda rows: rows @ weight.T, chunk=10).sum().backward()
    assert largest == 10 * vocab


@pytest.mark.parametrize(
    ("shape", "chunk", "message"),
    [((3, 11), 9, "expected logits or hidden"), ((8, 5), 9, "of 5 ids"), ((8, 11), 0, "chunk must be")],
)
def test_what_does_not_fit_is_refused(packed: Packed, shape: tuple[int, int], chunk: int, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        target_logprobs(torch.zeros(shape), packed, chunk=chunk)
