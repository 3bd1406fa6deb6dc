"""One of two hosts: publishes snapshots and tells the other what it asks for.

python source.py ADDRESS PORT VERSION      GYRE_KEYS names the file with the keys of both
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from gyre_transport import endpoint, keys
from gyre_transport.bus import Server
from gyre_transport.run import TransportConfig
from gyre_transport.snapshot import Manifest, SnapshotSource

TENSORS, ELEMENTS = 6, 1 << 20  # of 4 bytes


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """For the manifest."""


class Do(msgspec.Struct, frozen=True, tag="do"):
    """die: be killed. vanish: take the network away, answer nothing any more."""

    what: str


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer to all."""

    manifest: Manifest | None = None
    digests: dict[str, str] = {}


async def main(address: str, port: int, version: int) -> None:
    keys.use(keys.load(Path(os.environ["GYRE_KEYS"])))
    endpoint.configure(TransportConfig(listen=address, port=port + 1))
    rng = np.random.default_rng(version)
    tensors = {f"t{i}": rng.standard_normal(ELEMENTS, np.float32) for i in range(TENSORS)}
    with SnapshotSource("policy") as source:
        manifest = source.publish(version, {n: ("F32", t.shape, t) for n, t in tensors.items()})
        digests = {n: hashlib.sha256(t).hexdigest() for n, t in tensors.items()}
        over = asyncio.Event()

        async def handle(request: Ask | Do) -> Told:
            if isinstance(request, Ask):
                return Told(manifest, digests)
            if request.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if request.what == "vanish":
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
                over.set()
            return Told()

        async with Server(f"tcp://{address}:{port}", Ask | Do, handle):
            await over.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
