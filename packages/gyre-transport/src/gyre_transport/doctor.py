"""Which ways to remote memory work on this machine: each is tried against a real second process.

python -m gyre_transport.doctor allocate|register|mooncake      the second process: prints a descriptor, then waits
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import zmq

from gyre_transport.backends.mooncake import engine
from gyre_transport.backends.server import outward
from gyre_transport.backends.verbs import gpu, library
from gyre_transport.endpoint import Backend, configure
from gyre_transport.errors import DataError, TransportError, Unreachable
from gyre_transport.memory import Descriptor, allocate, read, register
from gyre_transport.run import TransportConfig

_BYTES = 1 << 20
_WAIT = 20.0  # seconds
_SILENT = "the second process did not answer"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One way on this machine."""

    backend: str  # process (shm, by process_vm_readv) | shm (its memfd) | tcp | verbs | mooncake | bus
    works: bool
    needed: bool  # nothing of Gyre runs without it
    use: str  # what it is for, in words that need no explanation
    detail: str  # how it was tried, or why it does not work
    remedy: str = ""  # what to do where it does not work


def examine() -> list[Finding]:
    """Try every way."""
    process = _try("register", "shm")
    shm = _try("allocate", "shm")
    tcp = _try("register", "tcp")
    return [
        Finding(
            backend="process",
            works=process is None,
            needed=tcp is not None,
            use="between processes of this machine: one copies the memory of the other",
            detail=process or "read 1 MiB of a second process with process_vm_readv",
            remedy=_remedy(
                process,
                "run both as one user in one container; allow it with --cap-add SYS_PTRACE, or with "
                "`sysctl kernel.yama.ptrace_scope=0`. Without it the next ways are taken, at less speed",
            ),
        ),
        Finding(
            backend="shm",
            works=shm is None,
            needed=tcp is not None,
            use="between processes of this machine, where the way above is forbidden",
            detail=shm or "read 1 MiB of a second process through its memfd",
            remedy=_remedy(shm, "run both as one user in one container, with /proc mounted"),
        ),
        Finding(
            backend="tcp",
            works=tcp is None,
            needed=shm is not None or process is not None,
            use="between machines over any network, and here where the ways above do not work",
            detail=tcp
            or "read 1 MiB of a second process over loopback. Other machines reach this one once transport.listen "
            f"names one of its addresses{f', such as {found}' if (found := outward()) else ''}",
            remedy=_remedy(tcp, "allow connections to 127.0.0.1; `ip link set lo up` where there is no loopback"),
        ),
        _verbs(),
        _mooncake(),
        _bus(),
    ]


def _remedy(failed: str | None, words: str) -> str:
    """`words` for a way that was tried and failed: one that got no second process was not."""
    if failed is None:
        return ""
    if failed.startswith(_SILENT):
        return "if that command prints a line at once, this machine was busy: run the doctor again"
    return words


def _verbs() -> Finding:
    """RDMA: what is here of what it needs, and whether it works."""
    devices = _devices()
    failed = _try("register", "verbs") if devices else "this machine has no RDMA device, or this container sees none"
    missing = []
    if not devices:
        missing.append(
            "a network card that can do RDMA (InfiniBand, or Ethernet with RoCE) and its driver: /sys/class/infiniband "
            "is empty"
        )
    try:
        library.load()
    except Unreachable as e:
        missing.append(str(e))
    remedy = "; ".join(missing) or "see the reason above; `ibv_devinfo` shows whether the port is up"
    return Finding(
        backend="verbs",
        works=failed is None,
        needed=False,
        use="between machines with RDMA: the network card reads the memory, many times faster than tcp",
        detail=(failed or f"read 1 MiB of a second process through {', '.join(devices)}") + _gpu(gpu.look()),
        remedy="" if failed is None else f"needed for it: {remedy}. Without it tcp is used; nothing else is lost",
    )


def _gpu(machine: gpu.Machine) -> str:
    return f". Memory of GPUs goes {gpu.how(machine)}" if machine.gpus else ""


def _mooncake() -> Finding:
    failed = _try("mooncake", "mooncake") if engine.installed() else f"{engine.PACKAGE} is not installed"
    return Finding(
        backend="mooncake",
        works=failed is None,
        needed=False,
        use="through Mooncake's transfer engine, only where transport.backends of both ends names it",
        detail=failed
        or "read 1 MiB of a second process through it. It proves no key: whoever reaches its ports may read and "
        "overwrite what is lent to it",
        remedy=""
        if failed is None
        else "nothing, unless you want it: pip install 'gyre-transport[mooncake]'. The ways above are faster",
    )


def _bus() -> Finding:
    works = zmq.has("curve")
    return Finding(
        backend="bus",
        works=works,
        needed=False,
        use="messages between machines, encrypted under the run's keys",
        detail=f"libzmq {zmq.zmq_version()} {'has' if works else 'was built without'} CURVE",
        remedy="" if works else "install pyzmq's own wheel (pip install --force-reinstall pyzmq)",
    )


def text(findings: list[Finding]) -> str:
    """The findings for people."""
    lines = ["Can memory of one process be read by another, from here? Each way was tried with a second process.", ""]
    for f in findings:
        lines.append(f"{'ok' if f.works else 'MISSING' if f.needed else 'no':<8}{f.backend:<9}{f.use}")
        for word, said in (("tried" if f.works else "why", f.detail), ("to do", f.remedy)):
            if said:
                lines += textwrap.wrap(
                    said, 110, initial_indent=" " * 8 + f"{word + ':':<9}", subsequent_indent=" " * 17
                )
        lines.append("")
    return "\n".join([*lines, _verdict(findings)])


def _verdict(findings: list[Finding]) -> str:
    lacking = [f.backend for f in findings if f.needed and not f.works]
    if lacking:
        return f"Gyre cannot run here: no way works. Make one of {', '.join(lacking)} work."
    local = next((f.backend for f in findings if f.works), "tcp")
    far = "verbs" if any(f.backend == "verbs" and f.works for f in findings) else "tcp"
    return (
        f"All that Gyre needs is here. It will use {local} on this machine and {far} between machines;\n"
        "ways that do not work are left out by themselves."
    )


def _devices() -> list[str]:
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


def _try(how: str, via: Backend) -> str | None:
    """Read a second process's memory; None when the bytes came, else why not."""
    argv = [sys.executable, "-m", "gyre_transport.doctor", how]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        try:
            line = _line(child)
            if not line:
                return f"{_SILENT} (it ended, or {_WAIT:.0f} s passed); run `{' '.join(argv)}` and read what it says"
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
    if how == "mooncake":
        configure(TransportConfig(backends=("mooncake",)))
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
