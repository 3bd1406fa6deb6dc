"""What one run measured, as a value and as tables."""

from __future__ import annotations

import os
import platform
from statistics import median
from typing import Any

import msgspec

from gyre_transport.bench.measure import Times, ratio, rounds, table
from gyre_transport.bench.owner import Owner
from gyre_transport.bench.paths import SMALL, Paths, base_of
from gyre_transport.terminal import Tally


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One path. `relative`: its speed over that of `base`, the median of the rounds."""

    path: str
    seconds: tuple[float, ...]  # a round
    gb_per_second: float  # of the median round
    base: str
    relative: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one run measured."""

    machine: str
    cores: int
    load: tuple[float, float]  # before and after
    size: int  # bytes of the large read
    small: int  # bytes of a small one
    count: int  # small reads
    skipped: tuple[str, ...]  # peers that are not here
    large_read: tuple[Result, ...]
    small_reads: tuple[Result, ...]


def measure(owner: Owner, size: int, count: int, times: int) -> Report:
    """Read `size` bytes of `owner` at once, and `count` small pieces, `times` rounds. Raises `DataError`."""
    before = os.getloadavg()[0]
    with Paths(owner.told, size, count) as paths:
        large, small = paths.large(), paths.small()
        with Tally("measuring", (len(large) + len(small)) * (times + 1)) as tally:
            of_large = rounds(large, times, paths.correct, progress=tally.step)
            of_small = rounds(small, times, progress=tally.step)
        missing = {"verbs": "verbs" not in paths.works, "shm": "shm" not in paths.works}
        missing["mooncake (pip install mooncake-transfer-engine-non-cuda)"] = owner.told["mooncake"] is None
    return Report(
        machine=platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        load=(before, os.getloadavg()[0]),
        size=size,
        small=SMALL,
        count=count,
        skipped=tuple(name for name, absent in missing.items() if absent),
        large_read=_results(of_large, size),
        small_reads=_results(of_small, count * SMALL),
    )


def _results(times: Times, nbytes: int) -> tuple[Result, ...]:
    return tuple(
        Result(
            path=name,
            seconds=tuple(seconds),
            gb_per_second=nbytes / median(seconds) / 1e9,
            base=base_of(name),
            relative=ratio(times, name, base_of(name)),
        )
        for name, seconds in times.items()
    )


def text(report: Report) -> str:
    """The report as tables."""

    def rows(results: tuple[Result, ...], of: Any) -> list[list[str]]:
        return [[r.path, *of(r), f"{r.gb_per_second:.2f}", f"{r.relative:.2f} {r.base}"] for r in results]

    def each(r: Result) -> list[str]:
        return [f"{report.count / median(r.seconds):,.0f}"]

    machine = f"{report.machine}, {report.cores} cores, load {report.load[0]:.1f} before and {report.load[1]:.1f} after"
    parts = [
        f"{machine}; medians of {len(report.large_read[0].seconds)} rounds",
        table([f"{report.size >> 20} MiB at once", "GB/s", "speed"], rows(report.large_read, lambda r: [])),
        table(
            [f"{report.count:,} x {report.small >> 10} KiB", "reads/s", "GB/s", "speed"], rows(report.small_reads, each)
        ),
    ]
    if report.skipped:
        parts.append("not here: " + ", ".join(report.skipped))
    return "\n\n".join(parts)
