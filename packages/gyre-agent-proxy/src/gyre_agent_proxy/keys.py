"""Per-execution API keys: `sk-gyre-<execution>.<signature>`.

The signature is an HMAC-SHA256 under the run's secret, so a key is its execution's and cannot be made from another one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from gyre_agent_proxy.errors import KeyFileError, Unauthorized

_PREFIX = "sk-gyre-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def load_secret(path: Path) -> bytes:
    """Return the secret in `path`, made by whoever comes first (mode 0600, appears whole). Raises `KeyFileError`."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(fd, "w") as f:
                    f.write(secrets.token_hex(32))
                    f.flush()
                    os.fsync(f.fileno())
                os.link(partial, path)  # unlike rename, never replaces the one another process made
            except FileExistsError:
                pass
            finally:
                os.unlink(partial)
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode & 0o777
    except OSError as e:
        raise KeyFileError(f"cannot use the run's secret {str(path)!r}: {e.strerror}; check the run directory") from e
    if mode & 0o077:
        raise KeyFileError(f"the secret {str(path)!r} has mode {mode:04o}, expected 0600; run `chmod 600` on it")
    if len(secret) < 32:
        raise KeyFileError(
            f"the secret {str(path)!r} holds {len(secret)} bytes, expected 64; delete it to make another"
        )
    return secret


def make_key(secret: bytes, execution: str) -> str:
    """Return the API key of `execution`. Raises `KeyFileError` for a name that cannot be part of a file name."""
    if not _NAME.fullmatch(execution):
        raise KeyFileError(f"an execution is named by letters, digits, '.', '_' and '-', got {execution!r}")
    return f"{_PREFIX}{execution}.{_sign(secret, execution)}"


def execution_of(secret: bytes | None, key: str) -> str:
    """Return the execution that `key` belongs to; without a secret every key is an execution of its own.

    Raises `Unauthorized`.
    """
    if secret is None:
        return "open-" + hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:16]
    execution, dot, signature = key.removeprefix(_PREFIX).rpartition(".")
    if not (key.isascii() and key.startswith(_PREFIX) and dot and _NAME.fullmatch(execution)):
        raise Unauthorized("the API key is not one of this run's (sk-gyre-<execution>.<signature>)")
    if not hmac.compare_digest(signature.encode(), _sign(secret, execution).encode()):
        raise Unauthorized(f"the API key's signature for execution {execution!r} is wrong; is it another run's?")
    return execution


def _sign(secret: bytes, execution: str) -> str:
    digest = hmac.new(secret, execution.encode(), hashlib.sha256).digest()
    return base64.b32encode(digest[:20]).decode().lower()
