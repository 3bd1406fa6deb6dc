"""Who may speak on the bus: the run's keys over tcp, and the same version of the protocol everywhere."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
import zmq

from gyre_transport import admission, framing, keys, sockets
from gyre_transport.bus import BlockingClient, Client, Publisher, Server, Subscriber
from gyre_transport.errors import (
    AccessDenied,
    BusError,
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
    PublisherSilent,
    VersionMismatch,
)

LONG = 60.0
TCP = "tcp://127.0.0.1:0"


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    text: str = "?"


class Said(msgspec.Struct, frozen=True, tag="said"):
    text: str


async def answer(request: Ask) -> Said:
    return Said(request.text)


async def until(condition) -> None:
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.01)


async def denied(client: Client | BlockingClient) -> str:
    """What a client that is refused is told. It is known once the handshake has ended: soon, if the machine is idle."""
    for deadline in (1.0, 5.0, LONG):
        try:
            if isinstance(client, BlockingClient):
                await asyncio.to_thread(client.call, Ask(), deadline=deadline)
            else:
                await client.call(Ask(), deadline=deadline)
        except AccessDenied as e:
            return str(e)
        except DeadlineExceeded:
            continue
        raise AssertionError("it was answered")
    raise AssertionError(f"it was not told in {LONG} s")


@pytest.fixture
def run() -> keys.Keys:
    return keys.generate()


@pytest.fixture(autouse=True)
def _no_keys():
    yield
    keys.use(None)
    assert not admission.gate._domains
    assert admission.gate._authenticator is None


# --- keys ----------------------------------------------------------------------------------------------------------


async def test_who_has_the_runs_keys_is_served(run):
    async with Server(TCP, Ask, answer, keys=run) as server:
        async with Client(server.address, Said, keys=run) as client:
            assert await client.call(Ask("a"), deadline=LONG) == Said("a")
        with BlockingClient(server.address, Said, keys=run) as blocking:
            assert await asyncio.to_thread(blocking.call, Ask("b"), deadline=LONG) == Said("b")
        assert server.refused == 0


def _others(run: keys.Keys) -> dict[str, keys.Keys | None]:
    other = keys.generate()
    client = {"client_public": other.client_public, "client_secret": other.client_secret}
    return {
        "none": None,
        "another client's": msgspec.structs.replace(run, **client),
        "another server's": msgspec.structs.replace(run, server_public=other.server_public),
        "another run's": other,
    }


@pytest.mark.parametrize("which", ["none", "another client's", "another server's", "another run's"])
async def test_who_has_others_is_refused_counted_and_told(run, which, caplog):
    theirs = _others(run)[which]
    handled = []

    async def note(request: Ask) -> Said:
        handled.append(request)
        return Said(request.text)

    async with Server(TCP, Ask, note, keys=run) as server:
        with caplog.at_level(logging.WARNING):
            async with Client(server.address, Said, keys=theirs) as client:
                assert re.search(r"Ask to 'tcp:.*bus\.keys", await denied(client))
            with BlockingClient(server.address, Said, keys=theirs) as blocking:
                await denied(blocking)
            await until(lambda: server.refused >= 2)
        assert "refused a peer without keys, or with another run's" in caplog.text
        assert not any(secret in caplog.text for secret in (run.client_secret, run.server_secret))
        async with Client(server.address, Said, keys=run) as client:  # the run is not disturbed
            assert await client.call(Ask("a"), deadline=LONG) == Said("a")
    assert handled == [Ask("a")]


async def test_a_peer_with_keys_does_not_talk_to_one_without(run):
    async with Server(TCP, Ask, answer) as server, Client(server.address, Said, keys=run) as client:
        await denied(client)


async def silence(subscriber: Subscriber) -> str:
    with pytest.raises(PublisherSilent) as error:
        await subscriber.receive()
    return str(error.value)


async def test_what_is_published_reaches_only_who_has_the_keys(run):
    async with Publisher(TCP, heartbeat=0.02, keys=run) as publisher:
        friend = Subscriber(publisher.address, Said, silence=LONG, keys=run)
        strangers = [Subscriber(publisher.address, Said, silence=1.0, keys=k) for k in _others(run).values()]
        await friend.connected(LONG)
        await publisher.publish(Said("secret"))
        assert await friend.receive() == Said("secret")
        for stranger in strangers:
            async with asyncio.timeout(LONG):
                while "the handshake failed" not in await silence(stranger):
                    pass
            with pytest.raises(AccessDenied):
                await stranger.connected(0.1)
            await stranger.close()
        await until(lambda: publisher.refused >= len(strangers))
        await friend.close()


async def test_two_runs_in_one_process_do_not_mix(run):
    other = keys.generate()
    async with Server(TCP, Ask, answer, keys=run) as one, Server(TCP, Ask, answer, keys=other) as two:
        for server, theirs in ((one, run), (two, other)):
            async with Client(server.address, Said, keys=theirs) as client:
                assert await client.call(Ask(), deadline=LONG) == Said("?")
        async with Client(one.address, Said, keys=other) as client:
            await denied(client)


async def test_a_process_uses_its_keys_on_tcp_and_not_on_ipc(run, tmp_path):
    keys.use(run)
    async with Server(TCP, Ask, answer) as server, Server(f"ipc://{tmp_path}/s", Ask, answer) as local:
        keys.use(None)
        async with Client(local.address, Said) as client:
            assert await client.call(Ask(), deadline=LONG) == Said("?")
        async with Client(server.address, Said) as client:
            await denied(client)
        keys.use(run)
        async with Client(server.address, Said) as client:
            assert await client.call(Ask(), deadline=LONG) == Said("?")


async def test_bytes_on_the_wire_are_encrypted(run):
    """A relay between client and server sees no word of theirs."""
    seen = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while piece := await source.read(1 << 16):
                seen.extend(piece)
                sink.write(piece)
            sink.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)

    async with Server(TCP, Annotated[Ask, ("hidden", 1)], answer, keys=run) as server:
        between = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{between.sockets[0].getsockname()[1]}"
        async with Client(address, Annotated[Said, ("hidden", 1)], keys=run) as client:
            assert await client.call(Ask("mellon"), deadline=LONG) == Said("mellon")
        between.close()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    assert len(seen) > 300
    assert b"mellon" not in seen
    assert b"hidden" not in seen


async def test_without_an_answering_gate_nobody_is_let_in(run, monkeypatch):
    async with Server(TCP, Ask, answer, keys=run) as server:
        admission.gate._authenticator.stop()
        async with Client(server.address, Said, keys=run) as client:
            with pytest.raises(DeadlineExceeded):
                await client.call(Ask(), deadline=0.5)


@pytest.mark.parametrize(
    "address", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://192.0.2.1:5000", "tcp://eth0:1"]
)
async def test_beyond_loopback_there_is_nothing_without_keys(address):
    for peer in (Server(address, Ask, answer), Publisher(address)):
        with pytest.raises(BusError, match=r"will not listen on .* without keys.*bus\.keys"):
            await peer.start()
    with pytest.raises(BusError, match=r"will not connect to .* without keys"):
        await Client(address, Said).call(Ask(), deadline=LONG)
    for make in (BlockingClient, Subscriber):
        with pytest.raises(BusError, match="without keys"):
            make(address, Said)


async def test_beyond_loopback_with_keys(run):
    async with Server("tcp://0.0.0.0:0", Ask, answer, keys=run) as server:
        address = f"tcp://127.0.0.1:{server.address.rpartition(':')[2]}"
        async with Client(address, Said, keys=run) as client:
            assert await client.call(Ask(), deadline=LONG) == Said("?")


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("ipc:///run/x", True),
        ("inproc://x", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://localhost.example.org:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://lo:1", False),
        ("tcp://[::]:1", False),
        ("tcp://127.0.0.1:0;10.0.0.1:1", False),
    ],
)
def test_what_only_this_machine_reaches(address, here):
    assert sockets.loopback(address) is here


def test_a_file_of_keys(tmp_path: Path):
    path = tmp_path / "run" / "bus.keys"
    made = keys.make(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.load(str(path)) == made
    assert made.server_secret not in repr(made)
    assert made.client_secret not in repr(made)
    with pytest.raises(ConfigError, match="cannot write"):
        keys.make(path)
    assert keys.load(path) == made


def test_files_that_are_not_taken_for_keys(tmp_path: Path):
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match=r"cannot read .*bus\.keys"):
        keys.load(path)
    made = keys.make(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        keys.load(path)
    path.chmod(0o600)
    for wrong in (
        b"",
        b"{}",
        os.urandom(200),
        msgspec.json.encode(msgspec.structs.replace(made, client_public=made.server_public)),
        msgspec.json.encode(msgspec.structs.replace(made, client_secret="x" * 40)),
        msgspec.json.encode(msgspec.structs.replace(made, server_secret="short")),
    ):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match="does not hold a run's keys") as error:
            keys.load(path)
        assert made.server_secret not in str(error.value)


def test_a_libzmq_without_curve(monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigError, match="without CURVE"):
        keys.generate()


# --- versions ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["ipc", "tcp"])
def address(request, tmp_path) -> str:
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else TCP


def of(messages, name: str, version: int):
    """`messages`, as those of a protocol."""
    return Annotated[messages, (name, version)]


@pytest.mark.parametrize("theirs", [("things", 2), ("other", 1), framing.UNNAMED])
async def test_another_version_is_an_error_that_names_both(address, theirs):
    handled = []

    async def note(request: Ask) -> Said:
        handled.append(request)
        return Said("")

    async with Server(address, of(Ask, "things", 1), note) as server:
        said = rf"serves 'gyre/2 things/1', its peer speaks 'gyre/2 {theirs[0]}/{theirs[1]}'; install the same version"
        async with Client(server.address, of(Said, *theirs)) as client:
            with pytest.raises(VersionMismatch, match=said):
                await client.call(Ask(), deadline=LONG)
        with BlockingClient(server.address, of(Said, *theirs)) as blocking:  # noqa: SIM117
            with pytest.raises(VersionMismatch, match=said):
                await asyncio.to_thread(blocking.call, Ask(), deadline=LONG)
        async with Client(server.address, of(Said, "things", 1)) as client:
            assert await client.call(Ask(), deadline=LONG) == Said("")
    assert len(handled) == 1


async def test_what_is_refused_is_logged(address, caplog):
    async with Server(address, of(Ask, "things", 1), answer) as server:
        with caplog.at_level(logging.WARNING):
            async with Client(server.address, of(Said, "things", 2)) as client:
                with pytest.raises(VersionMismatch):
                    await client.call(Ask(), deadline=LONG)
    assert "refused a message" in caplog.text
    assert "'gyre/2 things/2'" in caplog.text


async def test_a_peer_without_headers_is_told(address):
    """What a Gyre before headers sent, [id, request], is answered in the shape it expects."""
    async with Server(address, of(Ask, "things", 1), answer) as server:
        raw = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(server.address)
        await raw.send_multipart([b"\x00" * 8, msgspec.msgpack.encode(Ask())])
        async with asyncio.timeout(LONG):
            request_id, status, body = await raw.recv_multipart()
        raw.close()
    assert (request_id, status) == (b"\x00" * 8, b"error")
    fault = msgspec.msgpack.decode(body, type=framing.Fault)
    assert (fault.kind, "a version without headers" in fault.message) == ("VersionMismatch", True)


async def test_a_publisher_of_another_version(address):
    async with Publisher(address, of(Said, "things", 2), heartbeat=0.01) as publisher:
        subscriber = Subscriber(publisher.address, of(Said, "things", 1), silence=LONG)
        await subscriber.connected(LONG)
        with pytest.raises(VersionMismatch, match=r"serves 'gyre/2 things/2', its peer speaks 'gyre/2 things/1'"):
            await subscriber.receive()  # its heartbeat is enough
        await subscriber.close()


async def test_new_fields_with_defaults_keep_the_version(address):
    class Newer(msgspec.Struct, frozen=True, tag="ask"):
        text: str = "?"
        louder: bool = False

    class NewerSaid(msgspec.Struct, frozen=True, tag="said"):
        text: str
        by: str = "nobody"

    async def shout(request: Newer) -> NewerSaid:
        return NewerSaid(request.text.upper() if request.louder else request.text, "server")

    async with Server(address, Newer, shout) as server, Client(server.address, Said) as old:
        assert await old.call(Ask("a"), deadline=LONG) == Said("a")
    async with Server(address, Ask, answer) as server, Client(server.address, NewerSaid) as new:
        assert await new.call(Newer("a", louder=True), deadline=LONG) == NewerSaid("a")


async def test_a_version_mismatch_is_a_protocol_error():
    assert issubclass(VersionMismatch, ProtocolError)
    assert issubclass(AccessDenied, DeadlineExceeded)
