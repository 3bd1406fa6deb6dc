"""gyre-transport measured against what moves bytes without it; see docs/benchmarks.md.

    uv run python benchmarks/transport.py
    uv run --with mooncake-transfer-engine-non-cuda python benchmarks/transport.py --size 256

One process owns the memory and serves every path; this one reads. Rounds go through the paths in turn, so that a busy
machine is busy for all of them; medians and their ratios are printed. Peers that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import zmq

from gyre_transport import Descriptor, Manifest, Part, SnapshotSource, allocate, pull, read, read_many, register
from gyre_transport.buffers import aligned

SMALL = 64 << 10  # bytes
PIECE = 4 << 20  # bytes a zmq message or mooncake request
WAIT = 300.0


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


# --- the owner -------------------------------------------------------------------------------------------------------


def raw_server(memory: memoryview) -> int:
    """Plain sockets: (offset, length) in, bytes out. Returns the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(peer: socket.socket) -> None:
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while asked := peer.recv(16, socket.MSG_WAITALL):
                offset, length = int.from_bytes(asked[:8], "big"), int.from_bytes(asked[8:], "big")
                peer.sendall(memory[offset : offset + length])

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def zmq_server(memory: memoryview) -> str:
    """ZeroMQ: the same, without copies where it can. Returns the address."""
    reply = zmq.Context.instance().socket(zmq.REP)
    reply.bind("tcp://127.0.0.1:0")

    def serve() -> None:
        while True:
            offset, length = msgspec.msgpack.decode(reply.recv(), type=tuple[int, int])
            reply.send(memory[offset : offset + length], copy=False)

    threading.Thread(target=serve, daemon=True).start()
    return reply.getsockopt_string(zmq.LAST_ENDPOINT)


def mooncake_engine() -> Any:
    """Return a tcp engine of Mooncake's, or None where it is not installed."""
    try:
        from mooncake.engine import TransferEngine
    except ImportError:
        return None
    engine = TransferEngine()
    engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    return engine


def own(size: int) -> None:
    """Hold `size` bytes and a snapshot, and serve them every way until stdin ends."""
    region = allocate(size)
    region.array(np.uint32)[:] = np.arange(size // 4, dtype=np.uint32)
    local = aligned(size).view(np.uint32)
    local[:] = np.arange(size // 4, dtype=np.uint32)
    registered = register(local)
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
    mooncake = mooncake_engine()
    if mooncake is not None:
        mooncake.register_memory(local.ctypes.data, local.nbytes)
    told = {
        "shm": msgspec.msgpack.encode(region.descriptor).hex(),
        "process": msgspec.msgpack.encode(registered.descriptor).hex(),
        "manifest": encoded.hex(),
        "published": published,
        "overhead": overhead,
        "raw": raw_server(region.buffer),
        "zmq": zmq_server(region.buffer),
        "mooncake": None if mooncake is None else [f"127.0.0.1:{mooncake.get_rpc_port()}", local.ctypes.data],
    }
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    os._exit(0)  # the servers' threads wait for ever


# --- the reader ------------------------------------------------------------------------------------------------------


class Paths:
    """Every way from the owner's memory into `room`: `large` reads all of it, `small` many pieces of SMALL bytes."""

    def __init__(self, told: dict[str, Any], size: int, count: int) -> None:
        self.room, self._local = aligned(size), aligned(size)  # alike, or every copy is slower
        self.room[:] = 0
        self._local.view(np.uint32)[:] = np.arange(size // 4, dtype=np.uint32)
        places = np.random.default_rng(0).integers(0, size // SMALL, count)
        self.offsets = [int(p) * SMALL for p in places]
        self._shm, self._process = (
            msgspec.msgpack.decode(bytes.fromhex(told[k]), type=Descriptor) for k in ("shm", "process")
        )
        self._raw = socket.create_connection(("127.0.0.1", told["raw"]))
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._zmq = zmq.Context.instance().socket(zmq.REQ)
        self._zmq.connect(told["zmq"])
        self._mooncake, self._peer = mooncake_engine(), told["mooncake"]
        if self._mooncake is not None:
            self._mooncake.register_memory(self.room.ctypes.data, size)

    def correct(self, size: int) -> bool:
        """Whether `room` holds the owner's bytes."""
        return bool(np.array_equal(self.room[:size], self._local[:size]))

    def large(self) -> dict[str, Callable[[], None]]:
        """Read all of it."""
        size = self.room.nbytes
        paths = {
            "memcpy": lambda: np.copyto(self.room, self._local),
            "gyre shm": lambda: read(self._shm, self.room, deadline=WAIT, via="shm"),
            "gyre shm, registered": lambda: read(self._process, self.room.view(np.uint32), deadline=WAIT, via="shm"),
            "raw sockets": lambda: self._raw_read(0, size, self.room),
            "gyre tcp": lambda: read(self._shm, self.room, deadline=WAIT, via="tcp"),
            "zmq": lambda: self._zmq_read([(o, min(PIECE, size - o), o) for o in range(0, size, PIECE)]),
        }
        if self._mooncake is not None:
            paths["mooncake tcp"] = lambda: self._mooncake_read([(0, size, 0)])
        return paths

    def small(self) -> dict[str, Callable[[], None]]:
        """Read pieces of SMALL bytes from random places; one call each, or all in one."""
        into = [self.room[i * SMALL % self.room.nbytes :][:SMALL] for i in range(len(self.offsets))]
        both = list(zip(self.offsets, into, strict=True))

        def each(via: Any) -> None:
            for offset, room in both:
                read(self._shm, room, offset=offset, deadline=WAIT, via=via)

        def many(via: Any) -> None:
            read_many([Part(self._shm, room, offset) for offset, room in both], deadline=WAIT, via=via).wait()

        def raw() -> None:
            for offset, room in both:
                self._raw_read(offset, SMALL, room)

        def memcpy() -> None:
            for offset, room in both:
                np.copyto(room, self._local[offset : offset + SMALL])

        places = [(o, SMALL, i * SMALL % self.room.nbytes) for i, o in enumerate(self.offsets)]
        paths = {
            "memcpy": memcpy,
            "gyre shm, read": lambda: each("shm"),
            "gyre shm, read_many": lambda: many("shm"),
            "raw sockets": raw,
            "gyre tcp, read": lambda: each("tcp"),
            "gyre tcp, read_many": lambda: many("tcp"),
            "zmq": lambda: self._zmq_read(places),
        }
        if self._mooncake is not None:
            paths["mooncake tcp"] = lambda: self._mooncake_read(places)
        return paths

    def _raw_read(self, offset: int, length: int, room: Any) -> None:
        self._raw.sendall(offset.to_bytes(8, "big") + length.to_bytes(8, "big"))
        left = memoryview(room)
        while left:
            left = left[self._raw.recv_into(left, left.nbytes, socket.MSG_WAITALL) :]

    def _zmq_read(self, places: list[tuple[int, int, int]]) -> None:
        for offset, length, to in places:
            self._zmq.send(msgspec.msgpack.encode((offset, length)))
            frame = self._zmq.recv(copy=False)
            self.room[to : to + length] = np.frombuffer(frame.buffer, np.uint8)

    def _mooncake_read(self, places: list[tuple[int, int, int]]) -> None:
        name, remote = self._peer
        local = self.room.ctypes.data
        for offset, length, to in places:
            if self._mooncake.transfer_sync_read(name, local + to, remote + offset, length) < 0:
                raise SystemExit("mooncake failed")


def rounds(
    paths: dict[str, Callable[[], None]], count: int, check: Callable[[], bool] | None = None
) -> dict[str, list[float]]:
    """Seconds of each path, `count` times in turn, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(count + 1):
        for name, path in paths.items():
            began = perf_counter()
            path()
            took = perf_counter() - began
            if number:
                times[name].append(took)
            elif check is not None and not check():
                raise SystemExit(f"{name} brought other bytes")
    return times


def pulls(manifest: Manifest, readers: int, via: Any) -> Callable[[], None]:
    """`readers` at once, without checksums, each into room of its own that is used again."""
    rooms = [aligned(manifest.nbytes) for _ in range(readers)]

    def run() -> None:
        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(lambda room: pull(manifest, deadline=WAIT, into=room, via=via, verify=False), rooms))

    return run


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, the first column to the left."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Speed relative to `base`: the median over rounds of the two measured beside each other."""
    return median(b / t for b, t in zip(times[base], times[name], strict=True))


def base_of(name: str) -> str:
    """What a path is compared with."""
    return "memcpy" if name == "memcpy" or "shm" in name else "raw sockets"


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
        own(options.own)
        return
    size = options.size << 20
    owner = subprocess.Popen([sys.executable, __file__, "--own", str(size)], stdin=-1, stdout=-1, text=True)
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        line = ""
        while not line.startswith("{"):  # mooncake logs to stdout
            line = owner.stdout.readline() or sys.exit("the owner ended")
        told = json.loads(line)
        load = os.getloadavg()[0]
        paths = Paths(told, size, options.count)
        large = rounds(paths.large(), options.rounds, lambda: paths.correct(size))
        small = rounds(paths.small(), options.rounds)
        manifest = msgspec.msgpack.decode(bytes.fromhex(told["manifest"]), type=Manifest)
        snapshot = rounds(
            {f"{via}, {n} reader{'s' * (n > 1)}": pulls(manifest, n, via) for via in ("shm", "tcp") for n in (1, 4)},
            options.rounds,
        )
    finally:
        owner.stdin.close()
        owner.wait(WAIT)
    if options.json:
        print(json.dumps({"large": large, "small": small, "snapshot": snapshot, "load": load}))
        return
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after; medians of {options.rounds} rounds\n"
    )
    print(
        table(
            [f"{options.size} MiB", "GB/s", "relative to"],
            [
                [n, f"{size / median(t) / 1e9:.2f}", f"{ratio(large, n, base_of(n)):.2f} {base_of(n)}"]
                for n, t in large.items()
            ],
        ),
        "\n",
    )
    print(
        table(
            [f"{SMALL >> 10} KiB x {options.count:,}", "reads/s", "GB/s", "relative to"],
            [
                [
                    n,
                    f"{options.count / median(t):,.0f}",
                    f"{options.count * SMALL / median(t) / 1e9:.2f}",
                    f"{ratio(small, n, base_of(n)):.2f} {base_of(n)}",
                ]
                for n, t in small.items()
            ],
        ),
        "\n",
    )
    print(
        table(
            [f"snapshot, {len(manifest.entries)} tensors, {manifest.nbytes / 1e6:.0f} MB", "ms", "GB/s, all readers"],
            [
                [n, f"{median(t) * 1e3:.0f}", f"{manifest.nbytes * int(n.split()[1]) / median(t) / 1e9:.2f}"]
                for n, t in snapshot.items()
            ],
        )
    )
    published, overhead = told["published"] * 1e3, told["overhead"] * 1e3
    print(f"\npublished in {published:.0f} ms; manifest encoded and decoded in {overhead:.2f} ms")


if __name__ == "__main__":
    main()
