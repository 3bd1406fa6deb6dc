"""The tcp backend's two ends against peers that misbehave."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from gyre_transport import endpoint
from gyre_transport.backends import connection, server, session, tcp, wire
from gyre_transport.backends.kept import KEPT
from gyre_transport.descriptor import Endpoint, network
from gyre_transport.errors import ConfigError, DeadlineExceeded, ShapeMismatch, StaleDescriptor, Unreachable
from gyre_transport.memory import Descriptor, Region, allocate, read, read_chunks
from gyre_transport.run import TransportConfig

LONG = 60.0


@pytest.fixture
def configured() -> Iterator[None]:
    """The process's settings are as before afterwards."""
    before = endpoint.config()
    yield
    endpoint.configure(before)


@pytest.fixture
def region() -> Iterator[Region]:
    with allocate(100) as region:
        region.array()[:] = 7
        yield region


class Raw:
    """A client that says what it is told."""

    def __init__(self, region: Region) -> None:
        self.descriptor = region.descriptor
        where = self.descriptor.endpoint
        self.socket = socket.create_connection((where.host, where.port), LONG)

    def greet(self, version: int = wire.VERSION) -> bytes:
        mine = wire.nonce()
        self.socket.sendall(wire.HELLO.pack(wire.MAGIC, version, mine))
        magic, _, status, nonce, generation = wire.WELCOME.unpack(self.take(wire.WELCOME.size))
        assert (magic, status, generation) == (wire.MAGIC, wire.Status.OK, self.descriptor.owner.generation)
        return mine + nonce

    def request(self, nonces: bytes, number: int = 0, offset: int = 0, length: int = 100) -> bytes:
        body = wire.STRETCH.pack(offset, length & 0xFFFFFFFF, max(1, length >> 32), 0)
        return wire.REQUEST.pack(wire.Kind.READ, 1, self.descriptor.slot, self.proof(nonces, number, body)) + body

    def proof(self, nonces: bytes, number: int, body: bytes) -> bytes:
        d = self.descriptor
        return wire.proof(d.secret, nonces, number, wire.Kind.READ, len(body) // wire.STRETCH.size, d.slot, body)

    def take(self, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes and (piece := self.socket.recv(nbytes - len(got))):
            got += piece
        return got

    def closed(self) -> bool:
        """Whether the server closed the connection, and sent nothing before."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def test_an_answer_is_the_bytes_and_a_seal(region):
    with Raw(region) as raw:
        nonces = raw.greet()
        raw.socket.sendall(raw.request(nonces, 0) + raw.request(nonces, 1, 90, 10))
        for number, offset, length in ((0, 0, 100), (1, 90, 10)):
            assert raw.take(wire.ANSWER.size) == wire.ANSWER.pack(wire.Status.OK, number, length)
            assert raw.take(length) == b"\x07" * length
            proof = raw.proof(nonces, number, wire.STRETCH.pack(offset, length, 1, 0))
            assert raw.take(wire.MAC_BYTES) == wire.seal(raw.descriptor.secret, proof)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"X", wire.HELLO.pack(b"ERYG", 1, bytes(16))]
)
def test_who_does_not_greet_is_closed(region, garbage):
    with Raw(region) as raw:
        raw.socket.sendall(garbage)
        assert raw.closed()
    read(region.descriptor, bytearray(100), deadline=LONG, via="tcp")


@pytest.mark.parametrize("length", [wire.MAX_LENGTH + 1, (1 << 64) - 1])
def test_who_asks_for_too_much_at_once_is_closed(region, length):
    with Raw(region) as raw:
        raw.socket.sendall(raw.request(raw.greet(), length=length))
        assert raw.closed()


def test_a_request_arrives_in_pieces(region):
    with Raw(region) as raw:
        whole = wire.HELLO.pack(wire.MAGIC, wire.VERSION, bytes(16))
        for i in range(len(whole)):
            raw.socket.sendall(whole[i : i + 1])
        nonces = bytes(16) + wire.WELCOME.unpack(raw.take(wire.WELCOME.size))[3]
        request = raw.request(nonces)
        raw.socket.sendall(request[:20])
        raw.socket.sendall(request[20:])
        assert raw.take(wire.ANSWER.size + 100)[-100:] == b"\x07" * 100


def test_without_proof_not_a_byte_is_served(region):
    other = Raw(region)
    with other, Raw(region) as raw:
        overheard = raw.request(other.greet())  # it was good on another connection
        nonces = raw.greet()
        good = raw.request(nonces, 1)
        raw.socket.sendall(overheard + good + good)
        assert wire.ANSWER.unpack(raw.take(wire.ANSWER.size)) == (wire.Status.STALE, 0, 0)
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.closed()  # what follows a refusal is not answered
    for number, offset, length in ((1, 0, 100), (0, 1, 99)):  # the proof of another request
        with Raw(region) as raw:
            nonces = raw.greet()
            proof = raw.proof(nonces, number, wire.STRETCH.pack(offset, length, 1, 0))
            body = wire.STRETCH.pack(0, 100, 1, 0)
            raw.socket.sendall(wire.REQUEST.pack(wire.Kind.READ, 1, raw.descriptor.slot, proof) + body)
            assert wire.ANSWER.unpack(raw.take(wire.ANSWER.size)) == (wire.Status.STALE, 0, 0)


def test_what_is_outside_is_refused(region):
    for offset, length in ((1, 100), (101, 0), ((1 << 64) - 1, 10), (0, 101)):
        with Raw(region) as raw:
            raw.socket.sendall(raw.request(raw.greet(), offset=offset, length=length))
            assert wire.ANSWER.unpack(raw.take(wire.ANSWER.size)) == (wire.Status.OUTSIDE, 0, 0)


def test_another_version_is_told_so_and_gets_nothing(region):
    with Raw(region) as raw:
        raw.socket.sendall(raw.request(raw.greet(version=1)))
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.closed()


def test_who_asks_and_does_not_take_waits_with_bounded_memory(region):
    with Raw(region) as raw:
        nonces = raw.greet()
        many = 5_000
        sender = threading.Thread(
            target=raw.socket.sendall, args=(b"".join(raw.request(nonces, n) for n in range(many)),)
        )
        sender.start()
        read(region.descriptor, bytearray(100), deadline=LONG, via="tcp")  # the others are served meanwhile
        listener = region._record.listener
        assert all(
            len(c._waiting) <= wire.MAX_WAITING + session.RECEIVE // len(raw.request(nonces))
            for c in listener._sessions
        )
        size = wire.ANSWER.size + 100 + wire.MAC_BYTES
        answers = raw.take(many * size)
        assert [wire.ANSWER.unpack_from(answers, n * size)[1] for n in range(many)] == list(range(many))
        sender.join(LONG)


def test_a_reader_that_pauses_for_long_is_waited_for():
    with allocate(64 << 20) as region:
        pieces = read_chunks(region.descriptor, 16 << 20, LONG, via="tcp")
        next(pieces)
        time.sleep(2.5)  # longer than the kernel gives a machine that does not answer
        assert sum(piece.nbytes for _, piece in pieces) == 48 << 20


def test_a_connection_dropped_in_the_look_that_found_it_ready_leaves_the_others_served(region, caplog):
    """Its memory is taken back as its socket can take more."""
    listener = region._record.listener
    with allocate(16 << 20) as large, Raw(large) as raw:
        raw.socket.sendall(raw.request(raw.greet(), length=16 << 20))  # and takes nothing
        end = time.monotonic() + LONG
        while not (stalled := [s for s in listener._sessions if s.awaited & selectors.EVENT_WRITE]):
            assert time.monotonic() < end
            time.sleep(0.01)
        plain, ready = listener._selector.select, (listener._selector.get_key(stalled[0].socket), selectors.EVENT_WRITE)

        def select(timeout):
            found = plain(timeout)
            woken = any(key.fileobj == listener._wake for key, _ in found)
            return [*found, ready] if woken else found

        listener._selector.select = select
        read(region.descriptor, bytearray(100), deadline=LONG, via="tcp")  # the server looks anew
        large.revoke()
        assert len(raw.take(16 << 20)) < 16 << 20  # it was cut off
        del listener._selector.select
        tcp.disconnect()
        read(region.descriptor, bytearray(100), deadline=LONG, via="tcp")
    assert not caplog.records


def test_a_fault_in_one_connection_leaves_the_others_served(region, monkeypatch, caplog):
    def fail(session) -> None:
        raise ValueError("a bug")

    with Raw(region) as raw, monkeypatch.context() as patch:
        nonces = raw.greet()
        patch.setattr(session.Session, "send", fail)
        raw.socket.sendall(raw.request(nonces))
        assert raw.closed()
    read(region.descriptor, bytearray(100), deadline=LONG, via="tcp")
    assert "a fault of its server" in caplog.text


def test_who_says_nothing_is_closed(monkeypatch):
    with allocate(8) as region, Raw(region) as silent, Raw(region) as idle:
        idle.greet()
        monkeypatch.setattr(server, "_IDLE", 0.1)
        with Raw(region) as another:  # ends the sleep that the server began when more was allowed
            assert all(peer.closed() for peer in (silent, idle, another))


def test_more_connections_than_allowed(configured):
    endpoint.configure(TransportConfig(max_connections=2))
    with allocate(8) as region:
        with Raw(region) as one, Raw(region) as two:
            one.greet()
            two.greet()
            with pytest.raises(Unreachable, match="max_connections"):
                read(region.descriptor, bytearray(8), deadline=LONG, via="tcp")
            read(region.descriptor, bytearray(8), deadline=LONG)  # shm is not affected
            two.socket.shutdown(socket.SHUT_WR)
            assert two.closed()
            read(region.descriptor, bytearray(8), deadline=LONG, via="tcp")
        tcp.disconnect()


def test_an_owner_that_is_busy_when_it_is_connected_to_is_waited_for(script):
    owner = script("owner.py")
    raw = owner.ask("allocate", nbytes=100, seed=1)["descriptor"]
    descriptor = msgspec.msgpack.decode(bytes.fromhex(raw), type=Descriptor)
    os.kill(owner.pid, signal.SIGSTOP)
    goes_on = threading.Timer(3.0, os.kill, (owner.pid, signal.SIGCONT))  # longer than a machine takes to accept
    goes_on.start()
    read(descriptor, into := bytearray(100), deadline=LONG, via="tcp")
    goes_on.join()
    assert any(into)


class Fake:
    """A server that answers with what it is told, then waits to be left."""

    def __init__(self, *answers: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(host="127.0.0.1", port=self._listener.getsockname()[1], network=network())
        self._thread = threading.Thread(target=self._serve, args=(answers,))
        self._thread.start()

    def _serve(self, answers: tuple[bytes, ...]) -> None:
        peer, _ = self._listener.accept()
        with peer:
            for answer in answers:
                peer.recv(1 << 16)
                peer.sendall(answer)
            while peer.recv(1 << 16):
                pass

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(LONG)
        self._listener.close()


def welcome(descriptor, *, magic=wire.MAGIC, version=wire.VERSION, generation=None) -> bytes:
    generation = generation or descriptor.owner.generation
    return wire.WELCOME.pack(magic, version, wire.Status.OK, bytes(16), generation)


def at(fake: Fake, descriptor):
    return msgspec.structs.replace(descriptor, endpoint=fake.endpoint)


def test_a_service_that_is_not_gyre(region):
    for other in ({"magic": b"SSH-"}, {"version": 9}):
        with Fake(welcome(region.descriptor, **other)) as fake, pytest.raises(Unreachable, match="does not speak"):
            read(at(fake, region.descriptor), bytearray(100), deadline=LONG, via="tcp")


def test_another_generation(region):
    with (
        Fake(welcome(region.descriptor, generation=bytes(16))) as fake,
        pytest.raises(StaleDescriptor, match="another"),
    ):
        read(at(fake, region.descriptor), bytearray(100), deadline=LONG, via="tcp")


def test_bytes_of_one_who_does_not_have_the_key(region):
    answer = wire.ANSWER.pack(wire.Status.OK, 0, 100) + bytes(100) + bytes(wire.MAC_BYTES)
    with Fake(welcome(region.descriptor), answer) as fake, pytest.raises(StaleDescriptor, match="not sealed"):
        read(at(fake, region.descriptor), bytearray(100), deadline=LONG, via="tcp")


def test_an_owner_that_says_it_holds_less(region):
    answer = wire.ANSWER.pack(wire.Status.OUTSIDE, 0, 0)
    with Fake(welcome(region.descriptor), answer) as fake, pytest.raises(ShapeMismatch, match="holds less"):
        read(at(fake, region.descriptor), bytearray(100), deadline=LONG, via="tcp")


@pytest.mark.parametrize("greets", [False, True])
def test_an_owner_that_stops_answering(region, greets):
    answers = (welcome(region.descriptor),) if greets else ()
    with Fake(*answers) as fake, pytest.raises(DeadlineExceeded):
        read(at(fake, region.descriptor), bytearray(100), deadline=0.2, via="tcp")


def test_a_loopback_address_of_another_machine(region):
    where = msgspec.structs.replace(region.descriptor.endpoint, network="elsewhere")
    owner = msgspec.structs.replace(region.descriptor.owner, host="elsewhere")
    there = msgspec.structs.replace(region.descriptor, endpoint=where, owner=owner)
    with pytest.raises(Unreachable, match=r"shm: .* another machine.*; tcp: .* set transport\.listen"):
        read(there, bytearray(100), deadline=LONG)


def test_nothing_listens_when_told_not_to(configured):
    endpoint.configure(TransportConfig(listen=""))
    with allocate(8) as region:
        assert region.descriptor.endpoint is None
        read(region.descriptor, bytearray(8), deadline=LONG)
        with pytest.raises(Unreachable, match="does not listen"):
            read(region.descriptor, bytearray(8), deadline=LONG, via="tcp")


def test_only_the_backends_that_are_named_are_used(region, configured):
    endpoint.configure(TransportConfig(backends=("tcp",)))
    where = msgspec.structs.replace(region.descriptor, endpoint=None)
    with pytest.raises(Unreachable, match=r"^tcp: "):
        read(where, bytearray(100), deadline=LONG)
    read(region.descriptor, bytearray(100), deadline=LONG)


def test_an_address_that_is_taken_leaves_shm(configured, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint.configure(TransportConfig(port=taken.getsockname()[1]))
        with caplog.at_level(logging.WARNING), allocate(8) as region:
            assert region.descriptor.endpoint is None
            assert "transport.listen" in caplog.text
            read(region.descriptor, bytearray(8), deadline=LONG)


def test_an_address_to_advertise(configured):
    endpoint.configure(TransportConfig(listen="0.0.0.0", advertise="127.0.0.1"))  # noqa: S104
    with allocate(8) as region:
        assert region.descriptor.endpoint.host == "127.0.0.1"
        read(region.descriptor, bytearray(8), deadline=LONG, via="tcp")


def test_the_address_that_is_advertised_is_the_one_others_reach(configured, monkeypatch):
    def advertised(listen: str, advertise: str = "") -> str:
        return server.advertised(TransportConfig(listen=listen, advertise=advertise))

    assert advertised("192.0.2.7") == "192.0.2.7"
    assert advertised("0.0.0.0", "192.0.2.8") == "192.0.2.8"  # noqa: S104
    monkeypatch.setattr(server, "outward", lambda version: {4: "198.51.100.1", 6: None}[version])
    assert advertised("0.0.0.0") == "198.51.100.1"  # noqa: S104
    assert advertised("::") == "::1"


@pytest.mark.parametrize("wrong", [{"port": -1}, {"backends": []}, {"streams": 0}, {"max_connections": 0}])
def test_settings_that_cannot_be(wrong):
    from gyre_transport.config import section

    with pytest.raises(ConfigError, match="transport"):
        section({"transport": wrong}, "transport", TransportConfig)


def test_connections_are_kept_few_and_used_again(region):
    threads = [
        threading.Thread(target=read, args=(region.descriptor, bytearray(100)), kwargs={"deadline": LONG, "via": "tcp"})
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    (kept,) = connection._kept.idle.values()
    assert 1 <= len(kept) <= KEPT
    first = kept[-1]
    read(region.descriptor, bytearray(100), deadline=LONG, via="tcp")
    assert connection._kept.idle[first.key][-1] is first
    tcp.disconnect()
    assert not connection._kept.idle


def test_a_kept_connection_that_was_closed_is_not_used(region, eventually):
    read(region.descriptor, bytearray(100), deadline=LONG, via="tcp")
    (kept,) = connection._kept.idle.values()
    first = kept[0]
    for served in list(region._record.listener._sessions):
        served.socket.shutdown(socket.SHUT_RDWR)
    eventually(lambda: not first.usable)
    read(region.descriptor, bytearray(100), deadline=LONG, via="tcp")
    assert first.socket.fileno() < 0


def test_a_connection_that_failed_is_not_kept(region):
    with pytest.raises(StaleDescriptor):
        read(msgspec.structs.replace(region.descriptor, key=bytes(16)), bytearray(100), deadline=LONG, via="tcp")
    assert not connection._kept.idle


def test_a_forked_child_does_not_keep_its_parents_connections_up(tmp_path):
    """A reader notices the owner's end although a child that it forked lives on."""
    code = """
import os, signal, sys, msgspec
from gyre_transport.memory import allocate, read
region = allocate(100)
print(msgspec.msgpack.encode(region.descriptor).hex(), flush=True)
sys.stdin.readline()  # a reader is connected
child = os.fork()
if child == 0:
    with allocate(8) as own:
        read(own.descriptor, bytearray(8), deadline=60, via="tcp")
    print("child", flush=True)
    sys.stdin.readline()
    os._exit(0)
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdin=-1, stdout=-1)
    try:
        descriptor = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline().decode()), type=Descriptor)
        read(descriptor, bytearray(100), deadline=LONG, via="tcp")
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"child\n"
        process.kill()
        process.wait(LONG)
        with pytest.raises(StaleDescriptor):
            read(descriptor, bytearray(100), deadline=LONG, via="tcp")
    finally:
        process.kill()
        process.communicate(timeout=LONG)  # the end of stdin ends the child
