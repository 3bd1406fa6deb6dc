"""Publishes versions of a model's weights from a process of its own.

stdin: one version a line. stdout: its manifest as hex. Version v is the model with the rows of its output layer moved
down by v: the logits of token i become those of token i + v.
"""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np

from gyre_transport.process import follow_parent
from gyre_transport.snapshot import SnapshotSource


def main() -> None:
    follow_parent()
    data = (Path(sys.argv[1]) / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {
        name: (
            t["dtype"],
            tuple(t["shape"]),
            np.frombuffer(data[start + t["data_offsets"][0] : start + t["data_offsets"][1]], "u1"),
        )
        for name, t in header.items()
    }
    dtype, shape, head = tensors["lm_head.weight"]
    with SnapshotSource("tiny") as source:
        for line in sys.stdin:
            moved = np.ascontiguousarray(np.roll(head.reshape(shape[0], -1), int(line), axis=0)).reshape(-1)
            manifest = source.publish(int(line), {**tensors, "lm_head.weight": (dtype, shape, moved)})
            print(msgspec.msgpack.encode(manifest).hex(), flush=True)


if __name__ == "__main__":
    main()
