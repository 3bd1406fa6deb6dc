"""Model folders moved between processes: what a ticket opens, what is refused, what an interrupted pull leaves."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from gyre_transport import endpoint
from gyre_transport.cli import main
from gyre_transport.errors import (
    ChecksumMismatch,
    DataError,
    DeadlineExceeded,
    StaleDescriptor,
    StaleVersion,
    TicketError,
)
from gyre_transport.folder import Ticket, listing, pull, serve
from gyre_transport.memory import register
from gyre_transport.run import TransportConfig

LONG = 60.0
PIECE = 4 << 10
pull_module = sys.modules["gyre_transport.folder.pull"]
serve_module = sys.modules["gyre_transport.folder.serve"]


@pytest.fixture
def small(monkeypatch):
    """Pieces of 4 KiB, so that small files have many; files beyond 8 KiB are mapped."""
    for module in (listing, pull_module, serve_module):
        monkeypatch.setattr(module, "PIECE", PIECE)
    monkeypatch.setattr(serve_module, "_SMALL", 8 << 10)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as models come: shards, an index, config, tokenizer, a folder in it, a link, things to leave out."""
    folder = tmp_path / "model"
    (folder / "original").mkdir(parents=True)
    rng = random.Random(0)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, size in zip(shards, (100_000, 3 * PIECE), strict=True):
        (folder / name).write_bytes(rng.randbytes(size))
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "merges.txt").write_bytes(b"")
    (folder / "original" / "params.json").write_text("[]")
    (tmp_path / "blob").write_bytes(rng.randbytes(9_000))
    (folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_text("not of the model")
    (folder / ".gitattributes").write_text("nor this")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    }


@pytest.mark.parametrize("via", ["shm", "tcp"])
def test_a_folder_comes_whole(model, tmp_path, small, via):
    seen = []
    with serve(model) as served:
        assert served.ticket.nbytes == sum(map(len, contents(model).values()))
        out = tmp_path / "out" / "copy"
        pulled = pull(served.ticket, out, deadline=LONG, via=via, progress=lambda *done: seen.append(done))
    assert contents(out) == contents(model)
    assert not any(p.is_symlink() or p.name.startswith(".") for p in out.parent.rglob("*"))
    assert (pulled.files, pulled.nbytes, pulled.kept) == (7, served.ticket.nbytes, 0)
    assert seen[-1] == (served.ticket.nbytes, served.ticket.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_paths_may_be_text(model, tmp_path):
    ticket, out = str(tmp_path / "t.ticket"), tmp_path / "out"
    with serve(str(model)) as served:
        served.ticket.write(ticket)
        pull(Ticket.load(ticket), str(out), deadline=LONG)
    assert contents(out) == contents(model)


def test_an_empty_folder_is_filled_and_another_left_alone(model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with serve(model) as served:
        pull(served.ticket, out, deadline=LONG)
        assert contents(out) == contents(model)
        before = contents(out)
        (out / "config.json").write_text("mine")
        for there in (out, out / "config.json"):
            with pytest.raises(DataError, match="there already"):
                pull(served.ticket, there, deadline=LONG)
    assert contents(out) == {**before, "config.json": b"mine"}
    assert not list(tmp_path.glob(".*"))


# --- what is not served --------------------------------------------------------------------------------------------


def test_folders_that_cannot_be_served(model, tmp_path):
    with pytest.raises(DataError, match="is no folder"):
        serve(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds 0 files"):
        serve(tmp_path / "empty")
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"lacks 1 shards, such as 'model-00002-of-00002\.safetensors'"):
        serve(model)
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(DataError, match="no index of shards"):
        serve(model)


def test_a_file_that_changes_while_it_is_read(model, small):
    def write(done: int, total: int) -> None:
        with (model / "model-00001-of-00002.safetensors").open("ab") as file:
            file.write(b"more")

    with pytest.raises(DataError, match=r"model-00001.* changed while it was read"):
        serve(model, write)


@pytest.mark.parametrize("how", ["written", "appended", "truncated", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_served_is_refused(model, tmp_path, small, how):
    path = model / "model-00001-of-00002.safetensors"
    with serve(model) as served:
        assert served.changed() is None
        match how:
            case "written":
                with path.open("r+b") as file:
                    file.write(b"other")
            case "appended":
                with path.open("ab") as file:
                    file.write(b"more")
            case "truncated":
                os.truncate(path, 10)
            case "replaced":
                other = tmp_path / "other"
                other.write_bytes(path.read_bytes())
                other.replace(path)
            case "removed":
                path.unlink()
        assert served.changed() == path
        with pytest.raises(StaleVersion, match=r"model-00001.* changed at the server while it was served"):
            pull(served.ticket, tmp_path / "out", deadline=LONG)
        assert not (tmp_path / "out").exists()


def test_bytes_that_change_unnoticed_are_not_taken(model, tmp_path, small):
    path = model / "model-00001-of-00002.safetensors"
    with serve(model) as served:
        with path.open("r+b") as file:
            file.seek(50_000)
            file.write(b"other")
        with pytest.raises(ChecksumMismatch, match=r"model-00001.*Did it change at the server"):
            pull(served.ticket, tmp_path / "out", deadline=LONG)
    assert not (tmp_path / "out").exists()


# --- tickets -------------------------------------------------------------------------------------------------------


def test_a_ticket_is_a_private_file(model, tmp_path):
    path = tmp_path / "t.ticket"
    with serve(model) as served:
        served.ticket.write(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert Ticket.load(path) == served.ticket
        served.ticket.write(path)  # an older ticket may be replaced
        path.chmod(0o644)
        with pytest.raises(TicketError, match="chmod 600"):
            Ticket.load(path)
        path.chmod(0o600)
        path.write_text("precious")
        with pytest.raises(TicketError, match="is no ticket; name another"):
            served.ticket.write(path)
        assert path.read_text() == "precious"
        with pytest.raises(TicketError, match="is no ticket") as error:
            Ticket.load(path)
        assert "precious" not in str(error.value)
        with pytest.raises(TicketError, match="cannot write"):
            served.ticket.write(tmp_path / "no" / "such")
        with pytest.raises(TicketError, match="version 2"):
            Ticket.decode(msgspec.json.encode(msgspec.structs.replace(served.ticket, version=2)), "it")
    with pytest.raises(TicketError, match="cannot read"):
        Ticket.load(tmp_path / "none")


@pytest.mark.parametrize("via", ["shm", "tcp"])
def test_a_wrong_ticket_opens_nothing(model, tmp_path, via):
    with serve(model) as served, serve(model) as other:
        good = served.ticket
        wrong_key = msgspec.structs.replace(good.listing, key=bytes(16))
        for ticket, error in (
            (msgspec.structs.replace(good, listing=wrong_key), StaleDescriptor),
            (msgspec.structs.replace(good, digest=bytes(32)), ChecksumMismatch),
            (msgspec.structs.replace(good, listing=other.ticket.listing), ChecksumMismatch),
            (msgspec.structs.replace(good, listing=msgspec.structs.replace(good.listing, nbytes=1 << 40)), TicketError),
        ):
            with pytest.raises(error):
                pull(ticket, tmp_path / "out", deadline=LONG, via=via)
    with pytest.raises(StaleDescriptor, match="nobody serves 'model' under this ticket"):
        pull(good, tmp_path / "out", deadline=LONG, via=via)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["blob", "model"]


@pytest.mark.parametrize(
    "path", ["../x", "/etc/x", "a/../../x", "", ".", "..", "a//b", "a\\..\\x", "a/./b", "x\0y", "config.json/x", "./x"]
)
def test_a_server_cannot_write_outside_the_folder(model, tmp_path, path):
    with serve(model) as served:
        empty = listing.File(path=path, nbytes=0, digests=(), descriptor=None)
        evil = msgspec.structs.replace(served.listing, files=(*served.listing.files, empty))
        encoded = evil.encode()
        with register(bytearray(encoded)) as region:
            ticket = msgspec.structs.replace(
                served.ticket, listing=region.descriptor, digest=hashlib.sha256(encoded).digest()
            )
            with pytest.raises(DataError, match="refused"):
                pull(ticket, tmp_path / "out", deadline=LONG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["blob", "model"]


@pytest.mark.parametrize("how", ["twice", "negative", "digests", "size", "noise"])
def test_a_listing_that_contradicts_itself(model, tmp_path, how):
    with serve(model) as served:
        first = served.listing.files[0]
        changed = {
            "twice": [first, first],
            "negative": [msgspec.structs.replace(first, nbytes=-1)],
            "digests": [msgspec.structs.replace(first, digests=())],
            "size": [msgspec.structs.replace(first, nbytes=first.nbytes + 1)],
            "noise": [],
        }[how]
        encoded = msgspec.structs.replace(served.listing, files=tuple(changed)).encode() if changed else b"\xc1noise"
        with pytest.raises(DataError):
            listing.decode(encoded, hashlib.sha256(encoded).digest())


# --- interruptions -------------------------------------------------------------------------------------------------


def _break_after(monkeypatch, pieces: int) -> None:
    """The pull is cut off when so many pieces are in place."""
    left = [pieces]
    whole = pull_module._Puller._keep

    def keep(self, *arguments: object) -> None:
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        whole(self, *arguments)

    monkeypatch.setattr(pull_module._Puller, "_keep", keep)


def test_a_pull_that_was_cut_off_goes_on_where_it_was(model, tmp_path, small, monkeypatch):
    out = tmp_path / "out"
    with serve(model) as served, monkeypatch.context() as patch:
        _break_after(patch, 10)
        with pytest.raises(DataError, match=r"No space left on device; make room.*What came is kept"):
            pull(served.ticket, out, deadline=LONG)
    assert not out.exists()
    with serve(model) as again:  # another server, another ticket, the same bytes
        pulled = pull(again.ticket, out, deadline=LONG)
    assert pulled.kept >= 9 * PIECE
    assert contents(out) == contents(model)


def test_what_was_left_is_verified(model, tmp_path, small, monkeypatch):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    with serve(model) as served:
        with monkeypatch.context() as patch:
            _break_after(patch, 12)
            with pytest.raises(DataError):
                pull(served.ticket, out, deadline=LONG)
        shard = max(partial.iterdir(), key=lambda p: p.stat().st_size)
        with shard.open("r+b") as file:
            file.seek(PIECE + 1)
            file.write(b"rotten")
        (partial / "stranger").mkdir()
        (partial / "stranger" / "x").write_text("of another folder")
        (partial / "config.json").unlink(missing_ok=True)
        (partial / "config.json").symlink_to(tmp_path / "blob")
        blob = (tmp_path / "blob").read_bytes()
        pulled = pull(served.ticket, out, deadline=LONG)
    assert 0 < pulled.kept < 12 * PIECE
    assert contents(out) == contents(model)
    assert (tmp_path / "blob").read_bytes() == blob


def test_another_version_of_the_model_takes_over_what_is_equal(model, tmp_path, small, monkeypatch):
    out = tmp_path / "out"
    with serve(model) as served, monkeypatch.context() as patch:
        _break_after(patch, 20)
        with pytest.raises(DataError):
            pull(served.ticket, out, deadline=LONG)
    (model / "config.json").write_text('{"new": true}')
    with (model / "model-00001-of-00002.safetensors").open("r+b") as file:
        file.seek(2 * PIECE)
        file.write(b"trained")
    with serve(model) as served:
        pull(served.ticket, out, deadline=LONG)
    assert contents(out) == contents(model)


def test_two_pulls_into_one_folder(model, tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    fd = os.open(partial, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with serve(model) as served, pytest.raises(DataError, match="another pull"):
        pull(served.ticket, tmp_path / "out", deadline=LONG)
    os.close(fd)


def test_a_disk_without_room(model, tmp_path, monkeypatch):
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with (
        serve(model) as served,
        pytest.raises(DataError, match=r"needs 1\d\d,\d+ more bytes, the disk of .* has 10 free"),
    ):
        pull(served.ticket, tmp_path / "out", deadline=LONG)


def test_a_deadline(model, tmp_path, small):
    with serve(model) as served:
        with pytest.raises(DeadlineExceeded):
            pull(served.ticket, tmp_path / "out", deadline=0.0)
        _ = [pull(served.ticket, tmp_path / "out", deadline=LONG)]
    assert contents(tmp_path / "out") == contents(model)


# --- the command line, in processes of their own --------------------------------------------------------------------


class Serving:
    """`gyre-transport snapshot serve`, until it is left."""

    def __init__(self, folder: Path, ticket: Path, *arguments: str) -> None:
        argv = [sys.executable, "-m", "gyre_transport.cli", "snapshot", "serve", str(folder), "--ticket", str(ticket)]
        self.process = subprocess.Popen([*argv, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said = ""
        assert self.process.stderr is not None
        while "snapshot pull" not in self.said:
            line = self.process.stderr.readline()
            assert line, self.said
            self.said += line

    def end(self) -> tuple[int, str]:
        """Wait for the end; (exit code, stderr)."""
        _, said = self.process.communicate(timeout=LONG)
        return self.process.returncode, said


@pytest.fixture
def serving() -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*arguments: object) -> Serving:
        started.append(Serving(*arguments))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for s in started:
        s.process.kill()
        with contextlib.suppress(ValueError):
            s.process.communicate(timeout=LONG)


def run(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gyre_transport.cli", "snapshot", "pull", *map(str, arguments)]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=LONG, check=False)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    folder = tmp_path / "large"
    folder.mkdir()
    rng = random.Random(1)
    (folder / "config.json").write_text("{}")
    for i in range(4):
        (folder / f"model-{i}.safetensors").write_bytes(rng.randbytes(1 << 20) * 72)
    return folder


@pytest.mark.parametrize("via", ["shm", "tcp"])
def test_from_process_to_process(model, tmp_path, serving, via):
    ticket = tmp_path / "t.ticket"
    server = serving(model, ticket)
    assert stat.S_IMODE(ticket.stat().st_mode) == 0o600
    done = run(ticket, "--out", tmp_path / "out", "--via", via, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 7
    assert contents(tmp_path / "out") == contents(model)
    again = run(ticket, "--out", tmp_path / "out")
    assert (again.returncode, "there already" in again.stderr) == (1, True)
    server.process.terminate()
    assert server.end()[0] == 0
    assert not ticket.exists()
    gone = run(tmp_path / "t.ticket", "--out", tmp_path / "more")
    assert (gone.returncode, "cannot read the ticket" in gone.stderr) == (1, True)


def test_a_ticket_on_stdout_and_stdin(model, tmp_path, serving):
    server = serving(model, Path("-"), "--for", "3600")
    assert server.process.stdout is not None
    done = run("-", "--out", tmp_path / "out", stdin=server.process.stdout.readline())
    assert done.returncode == 0, done.stderr
    assert "7 files" in done.stdout
    assert contents(tmp_path / "out") == contents(model)
    wrong = run("-", "--out", tmp_path / "more", stdin="hello\n")
    assert (wrong.returncode, "what came on stdin is no ticket" in wrong.stderr) == (1, True)


def test_a_ticket_through_a_pipe(model, tmp_path, serving):
    """The server at its other end stays there: who waits for the pipe's end never pulls."""
    server = serving(model, Path("-"), "--for", "3600")
    argv = [sys.executable, "-m", "gyre_transport.cli", "snapshot", "pull", "-", "--out", str(tmp_path / "out")]
    done = subprocess.run(argv, stdin=server.process.stdout, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(model)


def test_a_server_killed_in_the_middle_and_the_pull_resumed(large, tmp_path, serving):
    """kill -9 after the first pieces; the pull says so at once, and the next one goes on from there."""
    ticket, out = tmp_path / "t.ticket", tmp_path / "out"
    server = serving(large, ticket)
    killed = threading.Event()

    def kill(done: int, total: int) -> None:
        if done >= 100 << 20 and not killed.is_set():
            killed.set()
            server.process.kill()
            server.process.wait(LONG)

    with pytest.raises(StaleDescriptor, match=r"the server of 'large' is gone.*bytes are kept in"):
        pull(Ticket.load(ticket), out, deadline=LONG, via="tcp", progress=kill)
    assert killed.is_set()
    assert not out.exists()
    old = run(ticket, "--out", out)  # the dead server's ticket is of no use
    assert (old.returncode, "nobody serves 'large' under this ticket" in old.stderr) == (1, True)
    serving(large, ticket)
    done = run(ticket, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kept"] >= 64 << 20
    assert contents(out) == contents(large)


def test_a_server_says_when_a_file_changes_and_ends(model, tmp_path, serving):
    ticket = tmp_path / "t.ticket"
    server = serving(model, ticket)
    (model / "config.json").write_text("{ }")
    code, said = server.end()
    assert code == 1
    assert "config.json' changed while it was served" in said
    assert not ticket.exists()


def test_serve_refuses_what_cannot_be(model, tmp_path, capsys, monkeypatch):
    assert main(["snapshot", "serve", str(tmp_path / "none")]) == 1
    assert "is no folder" in capsys.readouterr().err
    assert main(["snapshot", "serve", str(model), "--ticket", str(model / "t")]) == 1
    assert "would lie in the folder" in capsys.readouterr().err
    for port in ("70000", "-1"):
        assert main(["snapshot", "serve", str(model), "--port", port]) == 1
        assert f"--port is 0 to 65535 (0: a free one), got {port}" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("gyre_transport.folder.commands.serve", None)  # no model is read for an address that is not here
        assert main(["snapshot", "serve", str(model), "--ticket", str(tmp_path / "t"), "--listen", "192.0.2.1"]) == 1
    assert "cannot listen on 192.0.2.1" in capsys.readouterr().err
    monkeypatch.setattr("gyre_transport.backends.server.outward", lambda version: None)
    assert main(["snapshot", "serve", str(model), "--ticket", str(tmp_path / "t"), "--listen", "0.0.0.0"]) == 1  # noqa: S104
    assert "(--advertise)" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()
    endpoint.configure(TransportConfig())
