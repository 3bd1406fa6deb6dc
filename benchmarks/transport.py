"""gyre-transport measured against what moves bytes without it, and snapshots; see docs/benchmarks.md.

    uv run python benchmarks/transport.py
    uv run --with mooncake-transfer-engine-non-cuda python benchmarks/transport.py --size 256

The reads are those of `gyre-transport bench` (`gyre_transport.bench`). One process owns the memory and serves every
path; this one reads. Rounds go through the paths in turn, so that a busy machine is busy for all of them; medians and
their ratios are printed. Peers that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from transport_readers import Cost, Readers

from gyre_transport import Manifest, SnapshotSource
from gyre_transport.bench.measure import Times, ratio, rounds, table
from gyre_transport.bench.owner import Owner, open_every_way, own
from gyre_transport.bench.report import measure, text


def smollm2() -> dict[str, tuple[int, ...]]:
    """Shapes of SmolLM2-135M: 272 tensors, 269 MB in bf16."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, 576), "model.norm.weight": (576,)}
    for i in range(30):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (576,),
            f"{layer}post_attention_layernorm.weight": (576,),
            f"{layer}mlp.down_proj.weight": (576, 1536),
            f"{layer}mlp.gate_proj.weight": (1536, 576),
            f"{layer}mlp.up_proj.weight": (1536, 576),
            f"{layer}self_attn.k_proj.weight": (192, 576),
            f"{layer}self_attn.o_proj.weight": (576, 576),
            f"{layer}self_attn.q_proj.weight": (576, 576),
            f"{layer}self_attn.v_proj.weight": (192, 576),
        }
    return shapes


def serve(size: int) -> None:
    """Be the owner: of `size` bytes, and of a snapshot."""
    open_every_way()
    source = SnapshotSource("smollm2")
    rng = np.random.default_rng(0)
    tensors = {n: ("BF16", s, rng.integers(0, 1 << 16, int(np.prod(s)), dtype=np.uint16)) for n, s in smollm2().items()}
    began = perf_counter()
    manifest = source.publish(1, tensors)
    published = perf_counter() - began
    began = perf_counter()
    encoded = msgspec.msgpack.encode(manifest)
    msgspec.msgpack.decode(encoded, type=Manifest)
    overhead = perf_counter() - began
    own(size, {"manifest": encoded.hex(), "published": published, "overhead": overhead})


def pulls(readers: Readers) -> dict[str, Callable[[], None]]:
    """Pull the snapshot into processes of their own, alone and four at once."""
    orders: dict[str, dict[str, Any]] = {
        "nothing: what an order takes": {"nothing": True},
        "shm, each copies": {"via": "shm", "share": False, "into": True},
        "shm, mapped": {"via": "shm"},
        "shm, mapped and copied into tensors": {"via": "shm", "copy": True},
        "tcp, each reads": {"via": "tcp", "share": False},
        "tcp, one reads, the others map its copy": {"via": "tcp"},
        "tcp, the same, copied into tensors": {"via": "tcp", "copy": True},
    }
    paths = {}
    for name, order in orders.items():
        for count in (1, 4):
            key = f"{name}|{count}"
            paths[key] = readers.pull(key, count, **order)
    return paths


def pulled(snapshot: Times, costs: dict[str, list[Cost]], nbytes: int) -> list[list[str]]:
    """Rows of the table: time until the last has it, of 4 by 1; what the processors alone need; copies sent."""

    def row(name: str) -> list[str]:
        one, four = name + "|1", name + "|4"
        cpu = median(c.cpu for c in costs[four]) / (os.cpu_count() or 1)
        return [
            name,
            f"{median(snapshot[one]) * 1e3:.2f} ms",
            f"{median(snapshot[four]) * 1e3:.2f} ms",
            f"{1 / ratio(snapshot, four, one):.2f}",
            f"{cpu * 1e3:.2f} ms",
            f"{median(c.sent for c in costs[one]) / nbytes:.2g}, {median(c.sent for c in costs[four]) / nbytes:.2g}",
        ]

    return [row(name) for name in dict.fromkeys(n.split("|")[0] for n in snapshot)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="MiB of the large read")
    parser.add_argument("--count", type=int, default=10_000, help="small reads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the times, in seconds")
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        serve(options.own)
        return
    size = options.size << 20
    with Owner(size, [sys.executable, __file__, "--own"]) as owner:
        report = measure(owner, size, options.count, options.rounds)
        manifest = msgspec.msgpack.decode(bytes.fromhex(owner.told["manifest"]), type=Manifest)
        readers = Readers(owner.told["manifest"], 4)
        try:
            snapshot = rounds(pulls(readers), options.rounds, after=readers.drop)
        finally:
            readers.close()
        published, overhead = owner.told["published"] * 1e3, owner.told["overhead"] * 1e3
    if options.json:
        print(json.dumps({**msgspec.to_builtins(report), "snapshot": snapshot}))
        return
    print(text(report), "\n")
    print(
        table(
            [
                f"snapshot, {len(manifest.entries)} tensors, {manifest.nbytes / 1e6:.0f} MB",
                "1 reader",
                "4 readers",
                "4 by 1",
                "CPU of 4 / cores",
                "copies sent, to 1, 4",
            ],
            pulled(snapshot, readers.costs, manifest.nbytes),
        )
    )
    print(f"\npublished in {published:.0f} ms; manifest encoded and decoded in {overhead:.2f} ms")


if __name__ == "__main__":
    main()
