"""Traces of agent runs: what each call cost in tokens, and how long the agent then took on its own.

A trace file has a JSON object a line, gzipped if its name ends in .gz. The first line is
`{"format": "gyre-trace/1", …}`, every other one a run:

    {"task": "astropy-12907", "at": [0, 4, 17], "prompt": [1662, 5614, 6131], "output": [106, 500, 27]}

`at` are seconds from the first call to the start of each; `prompt` its whole prompt and `output` what was sampled, in
tokens. With `took`, the seconds each call took, the agent's own time between calls is exact; without, a call is taken
to have lasted its output tokens times 12 ms, which is what a regression finds in the shipped trace (0.71 correlated).
"""

from __future__ import annotations

import gzip
import importlib.resources
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from gyre_sched.errors import TraceError

FORMAT = "gyre-trace/1"
TOKEN_SECONDS = 0.012  # a sampled token, where a trace does not say how long its calls took
_SHIPPED = "data/traces/swebench_verified.jsonl.gz"
_EQUAL_TURNS = 40  # of a run of which only the duration is known; half of it is taken to be sampling


class Turn(NamedTuple):
    """One call and what the agent does after it."""

    fresh: int  # tokens of the prompt that the context before did not have
    output: int  # tokens sampled
    pause: float  # seconds until the next call: tools, and the agent itself


class Run(NamedTuple):
    """One execution as it was recorded."""

    task: str
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """Unique tokens: what training on it costs."""
        return sum(t.fresh + t.output for t in self.turns)

    def seconds(self, token_seconds: float = TOKEN_SECONDS) -> float:
        """How long it takes alone, prompts for nothing."""
        return sum(t.output * token_seconds + t.pause for t in self.turns)


class _Line(msgspec.Struct):
    format: str = ""
    task: str = ""
    at: tuple[float, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    took: tuple[float, ...] = ()


def turns(
    at: Iterable[float], prompt: Iterable[int], output: Iterable[int], took: Iterable[float] = ()
) -> tuple[Turn, ...]:
    """Calls in order -> turns. A prompt shorter than the context before it (a compaction) is all fresh."""
    starts, prompts, outputs = list(at), list(prompt), list(output)
    lasted = list(took) or [n * TOKEN_SECONDS for n in outputs]
    if not len(starts) == len(prompts) == len(outputs) == len(lasted) or not starts:
        raise TraceError(
            f"expected as many starts as prompts and outputs, at least one, got {len(starts)}, {len(prompts)}, "
            f"{len(outputs)} and {len(lasted)} durations"
        )
    made, context = [], 0
    for i, (p, o) in enumerate(zip(prompts, outputs, strict=True)):
        fresh = p - context if p >= context else (p if p < context // 2 else 0)
        gap = starts[i + 1] - starts[i] - lasted[i] if i + 1 < len(starts) else 0.0
        made.append(Turn(fresh, o, max(0.0, gap)))
        context = p + o
    return tuple(made)


def load_trace(path: str | Path | None = None) -> list[Run]:
    """The runs of a trace file, of a call log of gyre-traj or a folder of them (needs gyre-traj), or of a scheduler's
    journal (durations only); None: the trace that is shipped, 500 runs of mini-swe-agent on SWE-bench Verified.

    Raises `TraceError`."""
    if path is None:
        raw = (importlib.resources.files("gyre_sched") / _SHIPPED).read_bytes()
        return list(_lines(gzip.decompress(raw), "the shipped trace"))
    path = Path(path)
    try:
        if path.is_dir() or path.suffix == ".gtraj":
            runs = list(_logs(path))
        else:
            data = path.read_bytes()
            if data[:2] == b"\x1f\x8b":
                data = gzip.decompress(data)
            runs = list(_journal(path) if data.startswith(b'{"crc"') else _lines(data, repr(str(path))))
    except (OSError, EOFError, zlib.error) as e:  # gzip tells of its damage by all three
        raise TraceError(f"cannot read the trace {str(path)!r}: {e}; check the path and the file") from e
    if not runs:
        raise TraceError(
            f"expected at least one run in {str(path)!r}, got none; is it a trace, call logs or a journal?"
        )
    return runs


def past(runs: Iterable[Run], scale: float = 1.0) -> list[tuple[str, float]]:
    """Task of each run and the seconds it takes alone: what seeds a scheduler's predictor (`sched.past`)."""
    return [(run.task, run.seconds() * scale) for run in runs]


def write_trace(path: Path, runs: Iterable[Run]) -> None:
    """`runs` as a trace file that reads back as the same turns."""
    lines = [msgspec.json.encode({"format": FORMAT})]
    for run in runs:
        at = context = 0.0
        line: dict[str, list[float]] = {"at": [], "prompt": [], "output": [], "took": []}
        for t in run.turns:
            took = t.output * TOKEN_SECONDS
            for key, value in (("at", at), ("prompt", context + t.fresh), ("output", t.output), ("took", took)):
                line[key].append(value if key in ("at", "took") else int(value))
            at += took + t.pause
            context += t.fresh + t.output
        lines.append(msgspec.json.encode({"task": run.task, **line}))
    data = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _lines(data: bytes, name: str) -> Iterator[Run]:
    for number, line in enumerate(data.splitlines(), 1):
        try:
            read = msgspec.json.decode(line, type=_Line)
            if number == 1:
                if read.format != FORMAT:
                    raise TraceError(f"expected the format {FORMAT!r}, got {read.format!r}")
                continue
            yield Run(read.task, turns(read.at, read.prompt, read.output, read.took))
        except (msgspec.DecodeError, TraceError) as e:
            raise TraceError(f"line {number} of {name} is not of a trace: {e}") from e


def _logs(path: Path) -> Iterator[Run]:
    try:
        from gyre_traj import read_log
    except ImportError as e:
        raise TraceError(f"call logs such as {str(path)!r} are read with gyre-traj; install it") from e
    for file in sorted(path.glob("*.gtraj")) if path.is_dir() else [path]:
        calls = sorted(read_log(file).calls, key=lambda c: c.started)
        if calls:
            yield Run(
                calls[0].execution,
                turns(
                    [c.started - calls[0].started for c in calls],
                    [c.prefix + len(c.prompt) // 4 for c in calls],
                    [len(c.output) // 4 for c in calls],
                    [max(0.0, c.ended - c.started) for c in calls],
                ),
            )


def _journal(path: Path) -> Iterator[Run]:
    from gyre_sched.journal import read_journal

    started: dict[str, tuple[float, str]] = {}
    for event in read_journal(path).events:
        name = str(event.numbers.get("execution"))
        if event.kind == "started":
            started[name] = (event.at, str(event.numbers.get("task") or name))
        elif event.kind == "terminated" and name in started:
            at, task = started.pop(name)
            part = (event.at - at) / _EQUAL_TURNS / 2
            tokens = round(part / TOKEN_SECONDS)
            yield Run(task, (Turn(0, tokens, part),) * _EQUAL_TURNS)
