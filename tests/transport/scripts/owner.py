"""Owns memory and snapshots for tests, as told on stdin; reads others' where told.

python owner.py [PORT [HOST]]      PORT: to serve reads over tcp at. HOST: pretend to be on that machine
"""

import ctypes
import gc
import json
import os
import sys
import threading

import msgspec
import numpy as np

from gyre_transport import descriptor

if len(sys.argv) > 2:
    descriptor.host = lambda: sys.argv[2]

from gyre_transport import endpoint
from gyre_transport.backends.mooncake import engine as mooncake
from gyre_transport.backends.mooncake.channel import MooncakeChannel
from gyre_transport.backends.shm import ShmChannel
from gyre_transport.backends.tcp import TcpChannel, disconnect
from gyre_transport.backends.verbs.channel import VerbsChannel
from gyre_transport.memory import Descriptor, Region, allocate, read, register
from gyre_transport.notices import Notices
from gyre_transport.run import TransportConfig
from gyre_transport.snapshot import Manifest, Snapshot, SnapshotSource, pull

regions: list[Region] = []
sources: dict[str, SnapshotSource] = {}
notices: list[Notices] = []
snapshots: list[Snapshot] = []


def pattern(nbytes: int, seed: int) -> np.ndarray:
    block = np.random.default_rng(seed).integers(0, 256, 1 << 16, dtype=np.uint8)
    rows = np.arange(-(-nbytes // block.size), dtype=np.uint32).astype(np.uint8)
    return (block + rows[:, None]).reshape(-1)[:nbytes]


def tensors(seed: int, count: int, size: int) -> dict:
    return {f"t{i}": ("F32", (size,), np.full(size, seed, np.float32)) for i in range(count)}


def stall_once() -> None:
    plain = TcpChannel.complete

    def complete(self: TcpChannel) -> None:
        plain(self)
        TcpChannel.complete = plain
        print("null", flush=True)
        sys.stdin.readline()

    TcpChannel.complete = complete


def share(region: Region) -> dict:
    regions.append(region)
    return {"region": len(regions) - 1, "descriptor": msgspec.msgpack.encode(region.descriptor).hex()}


def act(do: str, a: dict) -> object:
    match do:
        case "allocate" | "allocate_shared":
            notices.append(Notices())
            calls = notices[-1] if a.get("notices") else None
            region = allocate(a["nbytes"], shared=do == "allocate_shared", calls=calls)
            region.array()[:] = pattern(a["nbytes"], a["seed"])
            return share(region)
        case "register":
            return share(register(pattern(a["nbytes"], a["seed"])))
        case "register_floats":
            return share(register(np.arange(a["count"], dtype=np.float32).reshape(-1, 2)))
        case "notice":
            return notices[-1].take(10.0).hex()
        case "close":
            regions[a["region"]].close()
            return None
        case "revoke":
            regions[a["region"]].revoke()
            return None
        case "renew":
            return msgspec.msgpack.encode(regions[a["region"]].renew()).hex()
        case "fill":
            regions[a["region"]].array()[:] = a["value"]
            return None
        case "count":
            with open("/proc/self/maps") as maps:
                mapped = sum("memfd:gyre-memory" in line for line in maps)
            return {
                "files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "mapped": mapped,
            }
        case "resident":
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        case "publish":
            if a["model"] not in sources:
                sources[a["model"]] = SnapshotSource(a["model"], fan_out=a.get("fan_out", 2))
            source = sources[a["model"]]
            parts = tensors(a["version"], a["count"], a["size"])
            manifest = source.advance(a["version"], parts, wait=a.get("wait", 0.0))
            return msgspec.msgpack.encode(manifest).hex()
        case "pull" | "stall_pull":  # the latter says so in its middle, then goes on when stdin says anything
            manifest = msgspec.msgpack.decode(bytes.fromhex(a["manifest"]), type=Manifest)
            options = {k: a[k] for k in ("share", "verify") if k in a}
            if do == "stall_pull":
                stall_once()
            try:
                snapshots.append(pull(manifest, deadline=a.get("deadline", 60.0), via="tcp", **options))
            except Exception as e:
                return [type(e).__name__, str(e)]
            values = {float(v) for _, _, data in snapshots[-1].values() for v in np.unique(np.frombuffer(data, "<f4"))}
            return {"values": sorted(values), "serves": snapshots[-1].serves}
        case "let_go":
            while snapshots:
                snapshots.pop().close()
            gc.collect()
            disconnect()
            return None
        case "readers":
            return [sources[a["model"]].readers, sources[a["model"]].copies]
        case "churn":
            source = SnapshotSource(a["model"])
            for version in range(a["versions"]):
                manifest = source.publish(version, tensors(version, a["count"], a["size"]))
                print(json.dumps(msgspec.msgpack.encode(manifest).hex()), flush=True)
            sources[a["model"]] = source
            return None
        case "close_source":
            sources[a["model"]].close()
            return None
        case "forget":
            sources.pop(a["model"]).close()
            return None
        case "undumpable":
            return ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        case "drop_privileges":
            os.setgid(65534)
            os.setuid(65534)
            return None
        case "stall":  # begin a read, say so, and never go on
            descriptor = msgspec.msgpack.decode(bytes.fromhex(a["descriptor"]), type=Descriptor)
            first = threading.Lock()  # of several streams one says so

            def stall(_: object) -> None:
                if first.acquire(blocking=False):
                    print("null", flush=True)
                threading.Event().wait()

            for channel in (ShmChannel, TcpChannel, VerbsChannel, MooncakeChannel):
                channel.complete = stall
            read(descriptor, bytearray(descriptor.nbytes), deadline=600, via=a["via"])
            return None
        case "read":
            descriptor = msgspec.msgpack.decode(bytes.fromhex(a["descriptor"]), type=Descriptor)
            try:
                read(descriptor, bytearray(descriptor.nbytes), deadline=10)
            except Exception as e:
                return [type(e).__name__, str(e)]
            return None
        case _:
            raise ValueError(do)


ways = ("shm", "verbs", "tcp")
if mooncake.installed():
    ways = (*ways, "mooncake")
    mooncake.engine("127.0.0.1")
endpoint.configure(TransportConfig(backends=ways, port=int(sys.argv[1]) if len(sys.argv) > 1 else 0))
for line in sys.stdin:
    arguments = json.loads(line)
    print(json.dumps(act(arguments.pop("do"), arguments)), flush=True)
