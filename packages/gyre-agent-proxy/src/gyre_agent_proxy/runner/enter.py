"""The first program in a sandbox: gives up root, bridges the proxy's port, becomes the program that is to run.

    python -I -S enter.py UID PORT SOCKET PROGRAM [ARGUMENT …]

UID: the plain user to become, -1: stay. PORT: on it, connections to 127.0.0.1 are passed on to the unix socket SOCKET
by a process of its own, 0: none are. Run by path: only the standard library is imported.
"""

import os
import socket
import sys


def main(argv: list[str]) -> None:
    """See the module's docstring."""
    uid, port, path, program = int(argv[0]), int(argv[1]), argv[2], argv[3:]
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
    try:
        os.execvp(program[0], program)  # noqa: S606
    except OSError as e:
        print(f"sandbox: cannot start {program[0]!r}: {e.strerror}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(127)


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
