"""Write .safetensors files: 8 bytes header length (little-endian), JSON header, data without gaps.

Format: https://github.com/huggingface/safetensors (no dependency on it, nor on torch).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre_transport.buffers import DTYPES
from gyre_transport.errors import DataError


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], memoryview]],
    *,
    fsync: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` (name -> (dtype, shape, bytes)) to `path`, whole or not at all.

    fsync: force file and folder to the disk. Raises `DataError` naming the path; nothing is left behind then.
    """
    names = sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]][0], name))  # wide types first: all are aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            with partial.open("wb", buffering=0) as file:
                for piece in (memoryview(len(text).to_bytes(8, "little") + text), *(tensors[n][2] for n in names)):
                    _write_all(file.fileno(), piece)
                if fsync:
                    os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        if fsync:
            _sync_folder(path.parent)
    except OSError as e:
        raise DataError(
            f"cannot write {str(path)!r} ({end:,} bytes): {e.strerror}; check that its folder exists and has room"
        ) from e


def _write_all(fd: int, data: memoryview) -> None:
    while data.nbytes:  # one write takes at most 2 GiB
        data = data[os.write(fd, data) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
