"""Configuration: one TOML file, dotted overrides from the command line, frozen structs.

    data = load(Path("run.toml"), ["runner.group_size=4"])
    runner = section(data, "runner", RunnerConfig)

Structs declare `forbid_unknown_fields=True`; a key nobody owns is an error, never ignored.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from gyre_transport.errors import ConfigError


def load(path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a TOML file (None: an empty one) and apply `section.key=value` overrides; raises `ConfigError`."""
    try:
        data = {} if path is None else tomllib.loads(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"cannot read the config {str(path)!r}: {e.strerror}; check the path") from e
    except ValueError as e:  # not TOML, or not UTF-8
        raise ConfigError(f"{str(path)!r} is not TOML: {e}") from e
    for override in overrides:
        _apply(data, override)
    return data


def _apply(data: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    parts = key.strip().lstrip("-").split(".")
    if not found or len(parts) < 2 or not all(parts):
        raise ConfigError(f"an override looks like section.key=value, got {override!r}")
    table = data
    for part in parts[:-1]:
        nested = table.setdefault(part, {})
        if not isinstance(nested, dict):
            raise ConfigError(f"{override!r}: {part!r} is a value, not a section")
        table = nested
    table[parts[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string
    return parsed["v"] if len(parsed) == 1 else text


def section[T](data: dict[str, Any], name: str, kind: type[T]) -> T:
    """Validate section `name` of `data` (missing = empty) into a frozen struct; raises `ConfigError`."""
    raw = data.get(name, {})
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(f"config section [{name}]: {e}{_hint(str(e), kind)}") from e


def only(data: dict[str, Any], names: set[str]) -> None:
    """Refuse sections that nobody owns; raises `ConfigError`."""
    for name in data:
        if name not in names:
            raise ConfigError(f"unknown config section [{name}]{_closest(name, names)}; known: {sorted(names)}")


def _hint(message: str, kind: type[Any]) -> str:
    if "unknown field" not in message or " at `$." in message:  # of a nested table: its keys are not known here
        return ""
    fields = {f.encode_name for f in msgspec.structs.fields(kind)} if issubclass(kind, msgspec.Struct) else set()
    unknown = message.split("`")[1]
    return f"{_closest(unknown, fields)}; known keys: {sorted(fields)}"


def _closest(name: str, names: set[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
