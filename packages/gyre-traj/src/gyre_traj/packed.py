"""A packed micro-step: what travels, and the arrays it stands for.

A micro-step is a forest laid out depth first. Token j has `position[j]` (its depth in its tree) and `end[j]` (the index
after its subtree); token i may attend to j iff j <= i < end[j]. Plain rows are trees without branches. Targets are a
list of their own, since a token where paths fork predicts several.

    rows [abcde]* [abxy]*      position 0 1 2 3 4 2 3     x is predicted by b: source 1
    ids   a b c d e x y        end      7 7 5 5 5 7 7     travels as: rows of shared 0, length 5; shared 2, length 4

Only ids and log-probabilities travel one a token. All else follows from the rows: how much of the row before each
repeats, how long it is, and which stretches of it are targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_traj.errors import BadRow
from gyre_traj.paths import in_float32


class TargetRun(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a row's path are targets."""

    start: int
    end: int
    temperature: float = 1.0
    version: int = -1  # weights that sampled them; -1: not known


class PackedRow(msgspec.Struct, frozen=True, array_like=True):
    """A path: the first `shared` tokens of the row before it, then tokens of its own up to `length`."""

    execution: int  # index into `Packed.executions`
    trajectory: int  # unique number in the batch
    weight: float  # of each target
    advantage: float
    shared: int
    length: int
    targets: tuple[TargetRun, ...]  # ascending, disjoint


class PackedArrays(NamedTuple):
    """The arrays of a `Packed`: n tokens, m targets."""

    ids: NDArray[np.uint32]  # [n] read-only
    position: NDArray[np.int32]  # [n] depth
    end: NDArray[np.int32]  # [n] index after the token's subtree
    source: NDArray[np.uint32]  # [m] index of the token whose logits predict the target
    target: NDArray[np.uint32]  # [m] the id to predict
    weight: NDArray[np.float32]  # [m]
    advantage: NDArray[np.float32]  # [m]
    logprob: NDArray[np.float32]  # [m] read-only; behaviour log-probability
    execution: NDArray[np.uint32]  # [m] index into `Packed.executions`
    trajectory: NDArray[np.uint32]  # [m] unique number in the batch
    temperature: NDArray[np.float32]  # [m] divide the target's logits by it: the behaviour policy did
    version: NDArray[np.int32]  # [m] weights that sampled the target; -1: not known


class Stretch(NamedTuple):
    """Targets of one run that lie side by side."""

    row: PackedRow
    run: TargetRun
    first: int  # index of the first
    size: int
    source: int  # index of the token that predicts the first; each of the others is predicted by the one before it


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """A micro-step on the wire. Whatever decodes or is made is whole: anything else raises `BadRow`."""

    ids: bytes  # uint32 LE [n]
    logprobs: bytes  # float32 LE [m], in the order of the rows and their runs
    rows: tuple[PackedRow, ...]
    executions: tuple[str, ...]
    budget: int  # tokens it was packed for

    def __post_init__(self) -> None:
        _check(self)

    @property
    def tokens(self) -> int:
        """n, the tokens to compute."""
        return len(self.ids) // 4

    @property
    def targets(self) -> int:
        """m, the targets."""
        return len(self.logprobs) // 4

    @property
    def over_budget(self) -> bool:
        """It is one row that is longer than the budget."""
        return self.tokens > self.budget

    @property
    def attended(self) -> int:
        """Pairs of tokens that attention computes: each token, and all before it on its path."""
        return sum(r.length * (r.length + 1) // 2 - r.shared * (r.shared + 1) // 2 for r in self.rows)

    def arrays(self) -> PackedArrays:
        """Make the arrays: 8 bytes a token and 36 a target beside what travels."""
        position = np.empty(self.tokens, dtype=np.int32)
        end = np.empty(self.tokens, dtype=np.int32)
        stretches = list(_lay_out(self.rows, position, end))
        count = np.array([s.size for s in stretches], dtype=np.int64)
        before = count.cumsum() - count
        place = np.arange(self.targets, dtype=np.int64)
        place += np.repeat(np.array([s.first for s in stretches], dtype=np.int64) - before, count)
        source = (place - 1).astype(np.uint32)
        source[before] = [s.source for s in stretches]
        ids = np.frombuffer(self.ids, dtype="<u4")

        def each(values: list[Any], dtype: type[np.generic]) -> NDArray[Any]:
            return np.repeat(np.array(values, dtype=dtype), count)

        return PackedArrays(
            ids=ids,
            position=position,
            end=end,
            source=source,
            target=ids[place],
            weight=each([s.row.weight for s in stretches], np.float32),
            advantage=each([s.row.advantage for s in stretches], np.float32),
            logprob=np.frombuffer(self.logprobs, dtype="<f4"),
            execution=each([s.row.execution for s in stretches], np.uint32),
            trajectory=each([s.row.trajectory for s in stretches], np.uint32),
            temperature=each([s.run.temperature for s in stretches], np.float32),
            version=each([s.run.version for s in stretches], np.int32),
        )


def _lay_out(rows: tuple[PackedRow, ...], position: NDArray[np.int32], end: NDArray[np.int32]) -> Iterator[Stretch]:
    """Fill `position` and `end`, and yield the targets.

    path: the current row's tokens from depth d on lie from index i on, for each (d, i), up to the next one's depth.
    """
    path: list[tuple[int, int]] = []
    laid, length = 0, 0

    def leave(depth: int) -> None:
        """No later row repeats the path beyond `depth`: those subtrees end here."""
        upto = length
        while upto > depth:
            d, i = path[-1]
            low = max(d, depth)
            end[i + low - d : i + upto - d] = laid
            if d >= depth:
                path.pop()
            upto = low

    for row in rows:
        leave(row.shared)
        if row.length > row.shared:
            path.append((row.shared, laid))
            position[laid : laid + row.length - row.shared] = np.arange(row.shared, row.length, dtype=np.int32)
            laid += row.length - row.shared
        length = row.length
        yield from _stretches(row, path)
    leave(0)


def _stretches(row: PackedRow, path: list[tuple[int, int]]) -> Iterator[Stretch]:
    """Targets of a row, parted where their path is."""
    part = 0
    for run in row.targets:
        at = run.start
        while at < run.end:
            while part + 1 < len(path) and path[part + 1][0] <= at:
                part += 1
            d, i = path[part]
            upto = min(run.end, path[part + 1][0]) if part + 1 < len(path) else run.end
            if at > d:
                source = i + at - d - 1
            else:  # where the path forks, the token before lies elsewhere
                above, j = path[part - 1]
                source = j + d - 1 - above
            yield Stretch(row, run, i + at - d, upto - at, source)
            at = upto


def _check(packed: Packed) -> None:
    """Raise `BadRow` unless every index that `arrays` will use is inside, and every number usable."""
    remedy = "pack and send it again"
    if len(packed.ids) % 4 or len(packed.logprobs) % 4:
        raise BadRow(
            f"packed ids and log-probabilities are 4 bytes each, got {len(packed.ids)} and {len(packed.logprobs)} "
            f"bytes; {remedy}"
        )
    tokens, targets, length = 0, 0, 0
    for i, row in enumerate(packed.rows):
        name = f"packed row {i}"
        if not 0 <= row.shared <= min(length, row.length):
            raise BadRow(
                f"{name} of {row.length!r} tokens shares {row.shared!r} with the one before, of {length!r}; {remedy}"
            )
        if not 0 <= row.execution < len(packed.executions):
            raise BadRow(f"{name} is of execution {row.execution!r}, of {len(packed.executions)}; {remedy}")
        if not 0 <= row.trajectory < 1 << 32:
            raise BadRow(f"{name} has trajectory number {row.trajectory!r}, expected one below 2^32; {remedy}")
        if not (in_float32(row.weight) and in_float32(row.advantage)):
            raise BadRow(
                f"{name}: weight {row.weight!r} and advantage {row.advantage!r} must be finite in float32; {remedy}"
            )
        at = 1
        for run in row.targets:
            if not at <= run.start < run.end <= row.length:
                raise BadRow(
                    f"{name} of {row.length!r} tokens has targets [{run.start!r}, {run.end!r}), expected a run at or "
                    f"after {at}; {remedy}"
                )
            if not (in_float32(run.temperature, above=0.0) and -1 <= run.version < 1 << 31):
                raise BadRow(f"{name}: temperature {run.temperature!r}, version {run.version!r} of a run; {remedy}")
            at = run.end
            targets += run.end - run.start
        tokens += row.length - row.shared
        length = row.length
    if (tokens, targets) != (packed.tokens, packed.targets):
        raise BadRow(
            f"packed rows have {tokens} tokens and {targets} targets, but {packed.tokens} ids and {packed.targets} "
            f"log-probabilities came with them; {remedy}"
        )
    if not math.isfinite(np.frombuffer(packed.logprobs, dtype="<f4").sum(dtype=np.float64)):
        raise BadRow(f"packed log-probabilities must be finite; {remedy}")
