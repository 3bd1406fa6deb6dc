"""Run a container's client, and remove the container when that has ended, however it did.

    python -I -S contained.py KIND CLIENT NAME PROGRAM [ARGUMENT …]     KIND: docker or podman; PROGRAM: `CLIENT run …`

Runs under a guard (gyre_transport.guard): SIGTERM is passed on by the client, which was sent it, too; a container that
does not end by itself then is removed while it runs, before the guard's grace is over. Exit code: the container's; 125,
and a last line that says so, if it could not be made. Run by path: only the standard library is imported.
"""

import signal
import subprocess
import sys
import time

NOT_MADE = 125, "sandbox: the container could not be made"
_GRACE = 1.5  # seconds from SIGTERM; the guard gives 5
_CALL = 30.0  # seconds
_UNSTARTED = ("created", "configured", "initialized")


def main(argv: list[str]) -> int:
    """See the module's docstring."""
    kind, client, name, program = argv[0], argv[1], argv[2], argv[3:]
    stopped: list[float] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.append(time.monotonic()))
    try:
        running = subprocess.Popen(program)
    except OSError as e:
        print(f"{NOT_MADE[1]}: {e}", file=sys.stderr, flush=True)  # noqa: T201
        return NOT_MADE[0]
    while running.poll() is None and not (stopped and time.monotonic() > stopped[0] + _GRACE):
        try:
            running.wait(0.1 if stopped else 1.0)
        except subprocess.TimeoutExpired:
            continue
    state = [] if stopped else _state(client, name)
    _remove(kind, client, name)
    code = running.wait()
    if stopped:
        return code
    if not state or state[0] in _UNSTARTED:
        print(f"{NOT_MADE[1]}; its client says why above", file=sys.stderr, flush=True)  # noqa: T201
        return NOT_MADE[0]
    if state[-1] == "true":
        print("sandbox: the container was out of memory", file=sys.stderr, flush=True)  # noqa: T201
    return code


def _state(client: str, name: str) -> list[str]:
    """Status and whether it was out of memory; nothing if there is no such container."""
    command = [client, "inspect", "--format", "{{.State.Status}} {{.State.OOMKilled}}", name]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_CALL, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.decode(errors="replace").split() if not done.returncode else []


def _remove(kind: str, client: str, name: str) -> None:
    now = ["--time", "0"] if kind == "podman" else []
    try:
        subprocess.run(
            [client, "rm", "--force", "--volumes", *now, name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_CALL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        print(f"sandbox: the container {name!r} could not be removed: {e}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
