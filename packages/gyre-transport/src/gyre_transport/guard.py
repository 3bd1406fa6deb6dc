"""Run a foreign program and end its whole process tree when it ends, when told to, or when the parent dies.

    python -I -S guard.py PROGRAM [ARGUMENT …]     (started by `gyre_transport.process.Child`)

The guard is a child subreaper: a process that PROGRAM leaves behind, daemons included, becomes the guard's child and is
ended with the rest. SIGTERM ends the tree, with a grace for PROGRAM; a second SIGTERM ends the grace. Exit code:
PROGRAM's (128 + signal if a signal ended it; 127 if it could not be started).
Only the standard library is imported: a guard runs beside every harness.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE = 5.0  # seconds for PROGRAM to end by itself
_GONE = 8.0  # seconds for what was killed to be gone: memory is given back first, which takes a busy machine long


def _children() -> list[int]:
    """Pids whose parent is this process."""
    found = []
    me = str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as f:
                    fields = f.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == me:
                found.append(int(name))
    return found


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _end_tree(program: "subprocess.Popen[bytes]", grace: float, stop: list[int]) -> None:
    """SIGTERM the program's session, then SIGKILL whatever is left until nothing is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGTERM)
    end = time.monotonic() + grace
    while program.poll() is None and time.monotonic() < end and len(stop) < 2:
        time.sleep(0.02)
    end = time.monotonic() + _GONE
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.poll()
        _reap()
        left = _children()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    print(f"guard: could not end the processes {left}", file=sys.stderr)  # noqa: T201


def main(argv: list[str]) -> int:
    """Run `argv`; see the module's docstring."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = int(os.environ.pop("GYRE_PARENT_FD", "-1"))
    ready = int(os.environ.get("GYRE_READY_FD", "-1"))  # PROGRAM's, when it is one of ours
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    signal.signal(signal.SIGINT, lambda number, _: stop.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        program = subprocess.Popen(
            argv,
            start_new_session=True,
            pass_fds=[ready] if ready >= 0 else [],
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # should the guard be killed
        )
    except (OSError, subprocess.SubprocessError) as e:
        print(f"guard: cannot start {argv[0]!r}: {e}", file=sys.stderr)  # noqa: T201
        return 127
    if ready >= 0:
        os.close(ready)
    watched = selectors.DefaultSelector()
    watched.register(wake_read, selectors.EVENT_READ)
    if parent >= 0:
        watched.register(parent, selectors.EVENT_READ)
    while program.poll() is None and not stop:
        for key, _ in watched.select():
            if not os.read(key.fd, 512) and key.fd == parent:
                stop.append(signal.SIGTERM)
    _end_tree(program, _GRACE, stop)
    code = program.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
