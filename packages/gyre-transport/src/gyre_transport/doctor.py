"""Which ways to remote memory work on this machine: each is tried against a real second process.

python -m gyre_transport.doctor allocate|register      the second process: prints a descriptor, ends at the end of stdin
"""

from __future__ import annotations

import os
import resource
import selectors
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from gyre_transport.backends.verbs import fabric, gpu, library
from gyre_transport.endpoint import Backend
from gyre_transport.errors import DataError, TransportError, Unreachable
from gyre_transport.memory import Descriptor, allocate, read, register

_BYTES = 1 << 20
_WAIT = 20.0  # seconds


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One way on this machine."""

    backend: str  # shm (its memfd) | process (its process_vm_readv) | tcp | verbs
    works: bool
    needed: bool  # nothing of Gyre runs without it
    use: str
    detail: str  # how it was tried, or why it does not work


def examine() -> list[Finding]:
    """Try every way."""
    shm = _try("allocate", "shm")
    process = _try("register", "shm")
    tcp = _try("register", "tcp")
    return [
        Finding(
            backend="shm",
            works=shm is None,
            needed=tcp is not None,
            use="one machine, where the next does not work: snapshots",
            detail=shm or "read 1 MiB of another process through its memfd",
        ),
        Finding(
            backend="process",
            works=process is None,
            needed=tcp is not None,
            use="one machine: snapshots, memory given to register()",
            detail=process or "read 1 MiB of another process with process_vm_readv",
        ),
        Finding(
            backend="tcp",
            works=tcp is None,
            needed=shm is not None or process is not None,
            use="where the above do not work, and other machines",
            detail=tcp
            or "read 1 MiB of another process over loopback; other machines reach this one once transport.listen names "
            "one of its addresses",
        ),
        _verbs(fabric.ports()),
    ]


def _verbs(ports: list[fabric.Port]) -> Finding:
    """RDMA: tried if a port is there; what is missing if not, or if it does not work."""
    failed = _try("register", "verbs") if ports else "no active RDMA port"
    if failed is None:
        detail = f"read 1 MiB of another process through {', '.join(f'{p} ({p.link})' for p in ports)}"
    else:
        detail = "; ".join([failed, *_missing()])
    return Finding(
        backend="verbs",
        works=failed is None,
        needed=False,
        use="other machines, by RDMA",
        detail=f"{detail}; GPU memory: {gpu.how(gpu.look())}",
    )


def _missing() -> list[str]:
    """What is here of what RDMA needs, and what is not."""
    try:
        devices = sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        devices = []
    found = [f"devices: {', '.join(devices)}" if devices else "no RDMA device (/sys/class/infiniband is empty)"]
    private = library.system_abi()
    found.append(
        "no rdma-core (libibverbs.so.1)" if private is None else f"rdma-core is there (private version {private})"
    )
    try:
        library.load()
        found.append("pyverbs works")
    except Unreachable as e:
        found.append(str(e))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        found.append(f"at most {soft >> 20:,} MiB may be locked (`ulimit -l`); registered memory is")
    return found


def _try(how: str, via: Backend) -> str | None:
    """Read a second process's memory; None when the bytes came, else why not."""
    argv = [sys.executable, "-m", "gyre_transport.doctor", how]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        try:
            line = _line(child)
            if not line:
                return f"the second process did not answer; run `{' '.join(argv)}` and read what it says"
            into = np.zeros(_BYTES, np.uint8)
            read(msgspec.msgpack.decode(bytes.fromhex(line), type=Descriptor), into, deadline=_WAIT, via=via)
            return None if np.array_equal(into, _pattern()) else "other bytes came than were there: report this"
        except (DataError, ValueError) as e:
            return str(e)
        finally:
            child.kill()


def _line(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None  # noqa: S101  (a pipe was asked for)
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        return child.stdout.readline().decode().strip() if selector.select(_WAIT) else ""


def _pattern() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.arange(_BYTES, dtype=np.uint32).astype(np.uint8)


def _serve(how: str) -> None:
    if how == "allocate":
        region = allocate(_BYTES, shared=True)
        region.array()[:] = _pattern()
    else:
        region = register(_pattern())
    with region:
        sys.stdout.write(msgspec.msgpack.encode(region.descriptor).hex() + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    try:
        _serve(sys.argv[1])
    except TransportError as e:
        sys.exit(str(e))
