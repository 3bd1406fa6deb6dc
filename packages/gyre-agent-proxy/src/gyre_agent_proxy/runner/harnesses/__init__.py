"""Harnesses by name: how each one is started so that it speaks to the proxy, asks nobody and calls nobody else.

A harness is a TOML file of this folder, or one of your own with the same keys (`Adapter`). In `command`, `env`, `stdin`
and `files`, placeholders are replaced as in a command of one's own (`RunnerConfig`), and beside those:

    {home}      a private folder of the execution outside the workspace, the harness's HOME; removed at its end
    {context}   tokens that prompt and answer may have together
    {output}    tokens that one answer may have

`files` are written below {home} before the start. Values are put into them as between the quotes of a JSON string,
which TOML and YAML read alike.
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from gyre_agent_proxy.runner.errors import HarnessError


class Adapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One harness; see the module's docstring."""

    command: tuple[str, ...]
    dialect: Literal["chat", "responses", "messages", ""] = ""
    npm: str = ""  # its package, if it is one of npm's …
    pypi: str = ""  # … or of PyPI's
    version: tuple[str, ...] = ()  # a command that prints its version
    versions: tuple[str, ...] = ()  # known to work, the best known first
    stdin: str = ""  # a file it reads; empty: it reads nothing
    env: dict[str, str] = {}
    files: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("command must not be empty")
        for name in self.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"files are named relative to the harness's home, got {name!r}")

    @property
    def install(self) -> str:
        """A command that installs it; empty where none is known."""
        if self.npm:
            return f"npm install -g {self.npm}" + (f"@{self.versions[0]}" if self.versions else "")
        if self.pypi:
            return f"uv tool install {self.pypi}" + (f"=={self.versions[0]}" if self.versions else "")
        return ""


def names() -> list[str]:
    """The harnesses that are built in."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def load(name: str) -> Adapter:
    """Return a harness by name, or from a file of one's own if `name` ends in .toml. Raises `HarnessError`."""
    try:
        if name.endswith(".toml"):
            raw = Path(name).read_bytes()
        elif name in names():
            raw = _folder().joinpath(f"{name}.toml").read_bytes()
        else:
            raise HarnessError(
                f"no harness is named {name!r}; known are {', '.join(names())}, or give a TOML file of your own, or a "
                "command as a list of strings"
            )
        return msgspec.toml.decode(raw, type=Adapter)
    except OSError as e:
        raise HarnessError(f"cannot read the harness file {name!r}: {e.strerror}; correct runner.harness") from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise HarnessError(f"the harness file {name!r} is wrong: {e}") from e


def _folder() -> Traversable:
    return resources.files(__name__)
