"""`gyre-transport snapshot serve` and `snapshot pull`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from gyre_transport import endpoint
from gyre_transport.descriptor import Endpoint
from gyre_transport.errors import DataError, StaleVersion, TicketError
from gyre_transport.folder.listing import Ticket
from gyre_transport.folder.pull import pull
from gyre_transport.folder.serve import Served, serve
from gyre_transport.memory import register
from gyre_transport.run import TransportConfig
from gyre_transport.sockets import loopback_host
from gyre_transport.terminal import Meter, size

_LOOK = 1.0  # seconds between looks at the files
_STDIO = Path("-")


def serve_folder(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, the end of `--for`, or a file changes. Raises `TransportError`."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        config = TransportConfig(listen=arguments.listen, port=arguments.port, advertise=arguments.advertise or "")
    except ValueError:
        raise DataError(f"--port is 0 to 65535 (0: a free one), got {arguments.port!r}") from None
    endpoint.configure(config)
    folder: Path = arguments.folder
    path: Path = arguments.ticket or Path(f"{folder.resolve().name}.ticket")
    if path != _STDIO and path.resolve().is_relative_to(folder.resolve()):
        raise TicketError(f"the ticket {str(path)!r} would lie in the folder that is served; name another place")
    with register(bytearray(1)) as probe:  # the listener starts: who cannot be reached need not read a model first
        where = _reachable(probe.descriptor.endpoint, arguments)
        with Meter(f"reading {folder}") as meter:
            served = serve(folder, meter.update)
        with served:
            _announce(served, path, where)
            try:
                return _until_ended(served, ended, arguments.seconds)
            finally:
                if path != _STDIO:
                    path.unlink(missing_ok=True)


def _reachable(where: Endpoint | None, arguments: argparse.Namespace) -> Endpoint:
    """Where others reach this process. Raises `DataError` when they cannot."""
    if where is None:
        raise DataError(
            f"cannot listen on {arguments.listen}:{arguments.port}; name an address of this machine and a free port "
            "(--listen, --port)"
        )
    if loopback_host(where.host) and not loopback_host(arguments.listen):
        raise DataError("no route leads from this machine to others; name the address they reach it at (--advertise)")
    return where


def _announce(served: Served, path: Path, where: Endpoint) -> None:
    if path == _STDIO:
        sys.stdout.write(served.ticket.encode().decode())
        sys.stdout.flush()
    else:
        served.ticket.write(path)
    ticket = "the ticket above" if path == _STDIO else f"the ticket {path}"
    sys.stderr.write(
        f"serving {served.listing.name}: {len(served.listing.files)} files, {size(served.ticket.nbytes)}, at {where}\n"
        f"take {ticket} to the other machine (it is a key: mode 0600), and there:\n"
        f"  gyre-transport snapshot pull {'TICKET' if path == _STDIO else path.name} --out FOLDER\n"
    )
    sys.stderr.flush()


def _until_ended(served: Served, ended: threading.Event, seconds: float | None) -> int:
    end = None if seconds is None else time.monotonic() + seconds
    while not ended.wait(_LOOK):
        if (changed := served.changed()) is not None:
            raise StaleVersion(f"{str(changed)!r} changed while it was served; serve the folder again")
        if end is not None and time.monotonic() >= end:
            break
    return 0


def pull_folder(arguments: argparse.Namespace) -> int:
    """Pull once. Raises `TransportError`."""
    if arguments.ticket == _STDIO:
        # one line, not to the end: in a pipe the server on the other side stays there
        ticket = Ticket.decode(sys.stdin.buffer.readline(1 << 20), "what came on stdin")
    else:
        ticket = Ticket.load(arguments.ticket)
    with Meter(f"pulling {ticket.name}") as meter:
        pulled = pull(ticket, arguments.out, deadline=arguments.deadline, via=arguments.via, progress=meter.update)
    if arguments.json:
        said = json.dumps(msgspec.to_builtins(pulled))
    else:
        kept = f", {size(pulled.kept)} of them from before" if pulled.kept else ""
        rate = size((pulled.nbytes - pulled.kept) / max(pulled.seconds, 1e-9))
        said = f"{pulled.out}: {pulled.files} files, {size(pulled.nbytes)}{kept}, {pulled.seconds:.1f} s, {rate}/s"
    sys.stdout.write(said + "\n")
    return 0
