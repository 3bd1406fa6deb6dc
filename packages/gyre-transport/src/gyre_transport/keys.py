"""The run's CURVE keys: what its processes prove themselves with on tcp sockets, and refuse everybody else by.

    launcher           make(RUN/bus.keys)          mode 0600; the config names the file, never what is in it
    every process      use(load(RUN/bus.keys))     from then on every tcp socket of the bus encrypts and authenticates

One pair proves servers, one proves clients; whoever can read the file belongs to the run. ipc sockets need no keys: the
folder they lie in says who may connect.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec
import zmq

from gyre_transport.errors import ConfigError


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two CURVE pairs, in Z85: 40 characters each."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:  # without the secrets: logs are read by others
        return f"<Keys of server {self.server_public!r} and client {self.client_public!r}>"


_used: Keys | None = None


def use(keys: Keys | None) -> None:
    """Set the keys of this process's sockets; those that are open keep theirs. None: loopback and ipc only."""
    global _used
    _used = keys


def used() -> Keys | None:
    """What `use` set."""
    return _used


def generate() -> Keys:
    """Return fresh keys. Raises `ConfigError` when libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError("libzmq was built without CURVE: install pyzmq's wheel, or stay on ipc and loopback")
    (server_public, server_secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    return Keys(
        server_public=server_public.decode(),
        server_secret=server_secret.decode(),
        client_public=client_public.decode(),
        client_secret=client_secret.decode(),
    )


def make(path: str | Path) -> Keys:
    """Write fresh keys to `path`, mode 0600, never over a file that is there. Raises `ConfigError`."""
    keys = generate()
    _write(Path(path), msgspec.json.format(msgspec.json.encode(keys)))
    return keys


def load(path: str | Path) -> Keys:
    """Read keys that `make` wrote. Raises `ConfigError`: no such file, readable by others, not keys."""
    text = _read(Path(path), "bus.keys")
    try:
        keys = msgspec.json.decode(text, type=Keys)
        for public, secret in (
            (keys.server_public, keys.server_secret),
            (keys.client_public, keys.client_secret),
        ):
            if zmq.curve_public(secret.encode()) != public.encode():
                raise ValueError("a public key is not its secret's")
    except (msgspec.DecodeError, ValueError, zmq.ZMQError) as e:
        # without the cause: it may quote what is in the file
        raise ConfigError(
            f"{str(path)!r} does not hold a run's keys ({type(e).__name__}); copy the file again, or delete it and "
            "start a new run"
        ) from None
    return keys


def make_token(path: Path) -> str:
    """Write a fresh token for an HTTP endpoint to `path`, as `make` does. Raises `ConfigError`."""
    token = secrets.token_urlsafe(32)
    _write(path, token.encode())
    return token


def load_token(path: Path, setting: str) -> str:
    """Read a token that `make_token` wrote; `setting` names the file in the config. Raises `ConfigError`."""
    token = _read(path, setting).decode(errors="replace").strip()
    if len(token) < 32 or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(f"{str(path)!r} ({setting}) holds no token: at least 32 characters of ASCII, no spaces")
    return token


def _write(path: Path, text: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise ConfigError(f"cannot write the key file {str(path)!r}: {e.strerror}; check the run directory") from e


def _read(path: Path, setting: str) -> bytes:
    try:
        mode = path.stat().st_mode & 0o777
        text = path.read_bytes()
    except OSError as e:
        raise ConfigError(
            f"cannot read the key file {str(path)!r} ({setting}): {e.strerror}; copy the file from where the run was "
            "started, mode 0600"
        ) from e
    if mode & 0o077:
        raise ConfigError(f"the key file {str(path)!r} has mode {mode:04o}, expected 0600; run `chmod 600` on it")
    return text
