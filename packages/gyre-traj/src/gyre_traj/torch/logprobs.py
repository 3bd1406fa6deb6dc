"""Log-probabilities of a micro-step's targets, from logits or from hidden states, a chunk of targets at a time.

A target at a branch's first token is predicted by the token where the path forks, so one token's logits may serve
several targets, at temperatures of their own:

    logπ_t = x[target_t] - logsumexp(x),   x = logits[source_t] / temperature_t
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gyre_traj.errors import BadRow
from gyre_traj.packing import Packed

Head = Callable[[torch.Tensor], torch.Tensor]


@overload
def target_logprobs(
    states: torch.Tensor, packed: Packed, head: Head | None = ..., *, chunk: int = ..., entropy: Literal[False] = ...
) -> torch.Tensor: ...
@overload
def target_logprobs(
    states: torch.Tensor, packed: Packed, head: Head | None = ..., *, chunk: int = ..., entropy: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...
def target_logprobs(
    states: torch.Tensor,
    packed: Packed,
    head: Head | None = None,
    *,
    chunk: int = 1024,
    entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target at its temperature [m], in the packed order.

    states: without a head logits [n, vocab], with one hidden states [n, h], from which it makes logits; a leading
    dimension of 1 may be there. Float32 logits exist for `chunk` targets at a time, in the backward pass too; with a
    head that is true of logits altogether, and the backward pass makes them again. entropy: return (log-probabilities,
    entropies of the same distributions [m] in nats). Both are differentiable once, and float32 (float64 from float64).
    Raises `BadRow`.
    """
    if states.dim() == 3 and states.shape[0] == 1:
        states = states[0]
    if states.dim() != 2 or states.shape[0] != packed.tokens:
        raise BadRow(
            f"expected logits or hidden states of shape ({packed.tokens}, …), one row a token of the micro-step; "
            f"got {tuple(states.shape)}"
        )
    if chunk < 1:
        raise BadRow(f"chunk must be at least 1 target, got {chunk!r}")
    arrays = packed.arrays()
    device = states.device
    source, target = (torch.from_numpy(a.astype("int64")).to(device) for a in (arrays.source, arrays.target))
    temperature = torch.from_numpy(arrays.temperature).to(device)
    highest = int(arrays.target.max()) if packed.targets else -1

    def gather(logits: torch.Tensor, *where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if highest >= logits.shape[-1]:
            raise BadRow(
                f"a target's id is {highest}, the logits are of {logits.shape[-1]} ids; is it another model's?"
            )
        found: tuple[torch.Tensor, torch.Tensor] = _Gather.apply(logits, *where, chunk, entropy)
        return found

    if head is None:
        logprobs, entropies = gather(states, source, target, temperature)
    else:

        def part(rows: torch.Tensor, target: torch.Tensor, divisor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gather(head(rows), torch.arange(len(rows), device=device), target, divisor)

        columns = (states[source], target, temperature)
        parts = [
            checkpoint(part, *rows, use_reentrant=False, preserve_rng_state=False)
            for rows in zip(*(column.split(chunk) for column in columns), strict=True)
        ]
        logprobs, entropies = (torch.cat(found) for found in zip(*parts, strict=True))
    return (logprobs, entropies) if entropy else logprobs


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """Logits [n, vocab], source, target, temperature [m] -> log-probabilities [m], entropies [m] (zeros if unasked).

    With p = softmax(x): ∂logπ/∂x = onehot(target) - p, ∂H/∂x = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor,
        chunk: int,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = logits.new_zeros(len(source), dtype=_wide(logits))
        entropies = torch.zeros_like(logprobs)
        for at in _chunks(len(source), chunk):
            every = _log_softmax(logits, source[at], temperature[at])
            logprobs[at] = every.gather(1, target[at, None])[:, 0]
            if entropy:
                entropies[at] = torch.special.entr(every.exp()).sum(-1)
        ctx.save_for_backward(logits, source, target, temperature, entropies)
        ctx.chunk, ctx.entropy = chunk, entropy
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_logprob: torch.Tensor, by_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, source, target, temperature, entropies = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for at in _chunks(len(source), ctx.chunk):
            p = _log_softmax(logits, source[at], temperature[at]).exp_()
            if ctx.entropy:
                part = (torch.special.entr(p) - p * entropies[at, None]) * by_entropy[at, None]
                part -= p * by_logprob[at, None]
            else:
                part = p.mul_(-by_logprob[at, None])
            part.scatter_add_(1, target[at, None], by_logprob[at, None])
            part /= temperature[at, None]
            gradient.index_add_(0, source[at], part.to(gradient.dtype))
        return gradient, None, None, None, None, None


def _log_softmax(logits: torch.Tensor, source: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return (logits[source].to(_wide(logits)) / temperature[:, None]).log_softmax(-1)


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, size, chunk)]
