"""Rows -> a file or folder for another stack, written as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from gyre_traj.adapters import Example
from gyre_traj.export import Totals

Writer = Callable[[Path, Iterator[Example], Totals, dict[str, Any]], None]
"""(where, examples, totals of a first pass, what was chosen); a folder's writer is given one that exists."""

_PADDED = 1 << 20  # tokens laid out at a time, with padding


def write_jsonl(path: Path, examples: Iterator[Example], totals: Totals, chosen: dict[str, Any]) -> None:
    """A row a line: ids, target (0 or 1), logprobs, temperature and version as lists of n, and what the row is."""

    def line(example: Example) -> dict[str, Any]:
        row = example.row
        return {
            "execution": row.execution,
            "group": example.group,
            "trajectory": row.trajectory,
            "role": row.role,
            "call": example.call,
            "finish": example.finish,
            "reward": example.reward,
            "advantage": row.advantage,
            "weight": row.weight,
            "units": totals.units,
            "ids": row.ids.tolist(),
            "target": row.target.astype(int).tolist(),
            "logprobs": (row.logprobs * row.target).tolist(),
            "temperature": row.temperature.tolist(),
            "version": row.version.tolist(),
        }

    _lines(path, map(line, examples))


def write_trl(path: Path, examples: Iterator[Example], totals: Totals, chosen: dict[str, Any]) -> None:
    """A line a `gyre_traj.adapters.trl.to_record`, and `units`."""
    from gyre_traj.adapters.trl import to_record

    _lines(path, (to_record(example) | {"units": totals.units} for example in examples))


def write_slime(path: Path, examples: Iterator[Example], totals: Totals, chosen: dict[str, Any]) -> None:
    """A line a dict for slime's `Sample.from_dict`; the reward is the advantage."""
    from gyre_traj.adapters.slime import to_samples

    _lines(path, to_samples(examples))


def write_parquet(path: Path, examples: Iterator[Example], totals: Totals, chosen: dict[str, Any]) -> None:
    """See `gyre_traj.adapters.datasets`."""
    from gyre_traj.adapters import datasets

    datasets.write_parquet(path, examples, units=totals.units, note=chosen)


def write_verl(path: Path, examples: Iterator[Example], totals: Totals, chosen: dict[str, Any]) -> None:
    """A folder that `gyre_traj.adapters.verl.load` reads."""
    from gyre_traj.adapters import verl

    rows = max(1, _PADDED // (totals.longest_prompt + totals.longest_response))

    def chunks() -> Iterator[verl.Batch]:
        while part := list(islice(examples, rows)):
            yield verl.to_batch(
                part,
                units=totals.units,
                pad_token_id=chosen["pad_token_id"],
                scores="reward" if part[0].reward is not None else "advantage",
                prompt_width=totals.longest_prompt,
                response_width=totals.longest_response,
            )

    verl.save(path, chunks(), totals.rows)


WRITERS: dict[str, Writer] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "slime": write_slime,
    "trl": write_trl,
    "verl": write_verl,
}
FOLDERS = frozenset({"verl"})  # the others write one file


def _lines(path: Path, lines: Iterable[Any]) -> None:
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for line in lines:
            file.write(encoder.encode(line) + b"\n")
