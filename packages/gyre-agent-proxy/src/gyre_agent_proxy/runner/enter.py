"""The first program in a sandbox: gives up root, bridges the proxy's port, becomes the program that is to run.

    python -I -S enter.py UID PORT SOCKET BYTES PROGRAM [ARGUMENT …]

UID: the plain user to become, -1: stay. PORT: on it, connections to 127.0.0.1 are passed on to the unix socket SOCKET
by a process of its own, 0: none are. BYTES: no file may become larger, 0: any may. As a container's process 1 it stays,
passes signals on and collects the dead, since programs do not expect to have to. Run by path: only the standard library
is imported.
"""

import os
import resource
import signal
import socket
import sys


def main(argv: list[str]) -> None:
    """See the module's docstring."""
    uid, port, path, size, program = int(argv[0]), int(argv[1]), argv[2], int(argv[3]), argv[4:]
    listener = None
    if port:
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if listener is not None:
        _bridge(listener, path)
        listener.close()
    if size:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    if os.getpid() == 1:
        _stay()
    try:
        os.execvp(program[0], program)  # noqa: S606
    except OSError as e:
        print(f"sandbox: cannot start {program[0]!r}: {e.strerror}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(127)


def _stay() -> None:
    """Go on as a child; this process ends with it, and the container with this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        os.setsid()
        return

    def pass_on(number: int, _: object) -> None:
        try:
            os.killpg(child, number)
        except ProcessLookupError:
            os.kill(child, number)  # it has no group of its own yet

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _bridge(listener: socket.socket, path: str) -> None:
    """Start the bridge as nobody's child: the program must not find one that it has to wait for."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        import asyncio

        asyncio.run(_serve(listener, path))
    finally:
        os._exit(1)


async def _serve(listener: socket.socket, path: str) -> None:
    import asyncio
    import contextlib

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Either side's end is passed on; when a side is lost, so is the other."""
        writers = [writer]
        with contextlib.suppress(OSError):  # a group's, too
            answers, there = await asyncio.open_unix_connection(path)
            writers.append(there)
            async with asyncio.TaskGroup() as both:
                both.create_task(pump(reader, there))
                both.create_task(pump(answers, writer))
        for each in writers:
            each.close()

    server = await asyncio.start_server(connected, sock=listener)
    await server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
