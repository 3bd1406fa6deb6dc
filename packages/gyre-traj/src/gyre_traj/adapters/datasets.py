"""Parquet: one row a trajectory, for Hugging Face datasets, and back to rows exactly. Needs pyarrow.

    from gyre_traj.adapters import datasets
    datasets.write_parquet("rows.parquet", examples, units=2.0)
    load_dataset("parquet", data_files="rows.parquet", split="train")     # Hugging Face's; streaming=True works
    rows = [example.row for example in datasets.read_parquet("rows.parquet")]

Columns, n tokens a row:

    execution, role, group, call, finish   string
    trajectory                             uint32   unique in the file
    reward                                 double   null: not scored
    advantage, weight                      double   of every target of the row
    ids                                    list<uint32>  [n]
    target                                 list<bool>    [n]
    logprobs                               list<float>   [n] 0 where not a target
    temperature                            list<float>   [n] 1 where not a target; null: 1 everywhere
    version                                list<int32>   [n] weights that sampled the target, else -1; null: not known

The file's metadata holds `gyre_traj`: JSON with `format` 1, `units` (the batch's denominator) and what the writer adds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_traj import Row
from gyre_traj.adapters import Example
from gyre_traj.errors import BadRow

FORMAT = 1
_TEXTS = ("execution", "role", "group", "call", "finish")
_LISTS = {"ids": np.uint32, "target": np.bool_, "logprobs": np.float32, "temperature": np.float32, "version": np.int32}
_PLAIN = {"logprobs": 0, "temperature": 1, "version": -1}  # what stands where nothing is a target
_NULL = ("temperature", "version")  # null when nothing else stands anywhere
_TOKENS = 1 << 19  # tokens of a row group, unless one row has more


def write_parquet(
    path: str | Path, examples: Iterable[Example], *, units: float, note: Mapping[str, Any] | None = None
) -> int:
    """Write examples as they come, a row group of about half a million tokens in memory at a time; return how many.

    `note` is added to the file's metadata. Raises `OSError`.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    metadata = {"format": FORMAT, "units": units} | dict(note or {})
    schema = pa.schema(
        [
            *((name, pa.string()) for name in _TEXTS),
            ("trajectory", pa.uint32()),
            *((name, pa.float64()) for name in ("reward", "advantage", "weight")),
            *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in _LISTS.items()),
        ],
        metadata={"gyre_traj": json.dumps(metadata)},
    )
    count, tokens, waiting = 0, 0, list[Example]()
    with pq.ParquetWriter(str(path), schema, compression="zstd") as writer:

        def flush() -> None:
            if waiting:
                writer.write_table(_table(waiting, schema))
                waiting.clear()

        for example in examples:
            waiting.append(example)
            count, tokens = count + 1, tokens + len(example.row.ids)
            if tokens >= _TOKENS:
                flush()
                tokens = 0
        flush()
    return count


def read_parquet(path: str | Path) -> Iterator[Example]:
    """Yield a file's examples, one row group in memory at a time. Raises `BadRow` when it is not such a file."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with _open(path) as file:
        missing = set(_LISTS) - {field.name for field in file.schema_arrow}
        if missing:
            raise BadRow(f"{str(path)!r} has no columns {sorted(missing)}; expected a file of `write_parquet`")
        assert isinstance(file, pq.ParquetFile)  # noqa: S101 - for the reader
        for i in range(file.num_row_groups):
            table = file.read_row_group(i)
            columns = {name: table.column(name).combine_chunks() for name in table.column_names}
            for at in range(table.num_rows):
                yield _example(columns, at)


def read_note(path: str | Path) -> dict[str, Any]:
    """The file's `gyre_traj` metadata: format, units and what its writer added. Raises `BadRow`."""
    with _open(path) as file:
        raw = (file.schema_arrow.metadata or {}).get(b"gyre_traj")
    if raw is None:
        raise BadRow(f"{str(path)!r} was not written by `write_parquet`: it has no gyre_traj metadata")
    note: dict[str, Any] = json.loads(raw)
    return note


def _open(path: str | Path) -> Any:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        return pq.ParquetFile(str(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise BadRow(f"{str(path)!r} cannot be read as Parquet: {error}") from error


def _stored(row: Row, name: str) -> NDArray[Any] | None:
    array: NDArray[Any] = getattr(row, name)
    if name not in _PLAIN:
        return array
    array = np.where(row.target, array, array.dtype.type(_PLAIN[name]))
    return None if name in _NULL and (array == _PLAIN[name]).all() else array


def _table(waiting: list[Example], schema: Any) -> Any:
    import pyarrow as pa  # type: ignore[import-untyped]

    rows = [example.row for example in waiting]
    columns: dict[str, Any] = {
        "execution": [row.execution for row in rows],
        "role": [row.role for row in rows],
        **{name: [getattr(example, name) for example in waiting] for name in _TEXTS[2:]},
        "trajectory": [row.trajectory for row in rows],
        "reward": [example.reward for example in waiting],
        "advantage": [row.advantage for row in rows],
        "weight": [row.weight for row in rows],
    }
    for name, dtype in _LISTS.items():
        arrays = [_stored(row, name) for row in rows]
        offsets = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)]).astype(np.int32)
        flat = np.concatenate([np.zeros(0, dtype), *(a.astype(dtype, copy=False) for a in arrays if a is not None)])
        absent = pa.array([array is None for array in arrays])
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), mask=absent)
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _example(columns: Mapping[str, Any], at: int) -> Example:
    def text(name: str) -> Any:
        return columns[name][at].as_py()

    def array(name: str) -> Any:
        value = columns[name][at]
        return value.values.to_numpy(zero_copy_only=False) if value.is_valid else None

    row = Row(
        execution=text("execution"),
        trajectory=text("trajectory"),
        ids=array("ids"),
        target=array("target"),
        logprobs=array("logprobs"),
        weight=text("weight"),
        advantage=text("advantage"),
        temperature=array("temperature"),
        version=array("version"),
        role=text("role"),
    )
    return Example(
        row=row,
        group=text("group"),
        reward=text("reward"),
        call=text("call"),
        finish=text("finish"),
    )
