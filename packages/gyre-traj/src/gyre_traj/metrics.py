"""Metrics of micro-steps: sums over targets that add up over micro-steps and cells, and the means made of them at last.

A mapping of names to numbers: a name that ends in `_max` is a maximum, every other one a sum. So parts can be merged in
any order and in any grouping. `gyre_traj.torch.loss_sum` lists the names it gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

_COUNTS = ("targets", "weight", "versioned")
_INTERMEDIATE = ("ratio_square", "logprob", "behaviour_logprob")  # what other means are made of


def merge_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add sums, take the largest of maxima. A name that a part lacks counts as nothing.

    Sums are rounded once, so the order of `parts` does not show even in the last bit.
    """
    gathered: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            gathered.setdefault(name, []).append(value)
    return {name: max(values) if name.endswith("_max") else _add(values) for name, values in gathered.items()}


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Merged sums -> means over targets, maxima as they are, and what is made of several sums, as far as given:

    effective_sample  (Σr)² / (n·Σr²) in (0, 1]: the share of targets that equally weighted ones would need
    chi_square        Σr² / n - 1, the χ² divergence of the trainer from β
    perplexity        exp(-Σ logπ / n) of the trainer; behaviour_perplexity likewise of the engine
    staleness         over the targets whose version is known

    Empty when there are no targets.
    """
    n = sums.get("targets", 0.0)
    if not n:
        return {}
    means = {
        name: value if name.endswith("_max") else value / n
        for name, value in sums.items()
        if name not in _COUNTS and name not in _INTERMEDIATE and name != "staleness"
    }
    if sums.get("ratio_square"):
        means["effective_sample"] = sums["ratio"] ** 2 / (n * sums["ratio_square"])
        means["chi_square"] = sums["ratio_square"] / n - 1
    for name, source in (("perplexity", "logprob"), ("behaviour_perplexity", "behaviour_logprob")):
        if source in sums:
            means[name] = math.exp(min(-sums[source] / n, 700.0))
    if sums.get("versioned"):
        means["staleness"] = sums["staleness"] / sums["versioned"]
    return means


def _add(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities among them
        return sum(values)
