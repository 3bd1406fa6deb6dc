"""Which role a call has: a table of rules (TOML), the first that matches wins.

    role_header = "x-gyre-role"          # a request that carries it says its role itself
    caller_headers = ["x-session-id"]    # tell agents of one execution apart: equal requests of two are two calls

    [[rule]]
    harness = "opencode"                 # for the reader
    role = "main-summary"
    system_begins = "You are a context summarization agent"
    tools = 0

Conditions of a rule (all that are given must hold): header (present), header_value (begins so), header_json (a JSON
header whose fields have these values), system_begins, system_contains, last_user_begins, tools (exact number), tool
(offered).
A call that no rule matches is `main` and counted as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from gyre_agent_proxy.conversation import Conversation
from gyre_agent_proxy.errors import RoleTableError

_ROLE = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row; see the module's docstring."""

    role: str
    harness: str = ""
    header: str | None = None
    header_value: str | None = None
    header_json: dict[str, str] = {}
    system_begins: str | None = None
    system_contains: str | None = None
    last_user_begins: str | None = None
    tools: int | None = None
    tool: str | None = None

    def __post_init__(self) -> None:
        if (self.header_value is not None or self.header_json) and self.header is None:
            raise ValueError("header_value and header_json need header")

    def matches(self, headers: Mapping[str, str], conversation: Conversation) -> bool:
        """Whether every condition holds."""
        if self.header is not None:
            value = headers.get(self.header)
            if value is None or (self.header_value is not None and not value.startswith(self.header_value)):
                return False
            if self.header_json and not _has(value, self.header_json):
                return False
        system = "\n".join(m.text for m in conversation.messages if m.role == "system")
        if self.system_begins is not None and not system.lstrip().startswith(self.system_begins):
            return False
        if self.system_contains is not None and self.system_contains not in system:
            return False
        if self.last_user_begins is not None:
            last = conversation.asks
            if last is None:
                last = next((m.text for m in reversed(conversation.messages) if m.role == "user"), "")
            if not last.lstrip().startswith(self.last_user_begins):
                return False
        if self.tools is not None and len(conversation.tools) != self.tools:
            return False
        return self.tool is None or self.tool in tool_names(conversation.tools)


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role_header: str = "x-gyre-role"
    caller_headers: tuple[str, ...] = ()
    rule: tuple[Rule, ...] = ()


class Roles:
    """A role table."""

    def __init__(
        self, rules: Sequence[Rule], role_header: str = "x-gyre-role", caller_headers: Sequence[str] = ()
    ) -> None:
        self.rules = tuple(rules)
        self.role_header = role_header
        self.caller_headers = tuple(caller_headers)

    @classmethod
    def load(cls, source: str = "default") -> Roles:
        """Read a table: "default" or a path. Raises `RoleTableError`."""
        try:
            if source == "default":
                text = resources.files("gyre_agent_proxy").joinpath("data/roles.toml").read_text()
            else:
                text = Path(source).read_text()
            table = msgspec.toml.decode(text, type=_Table)
        except OSError as e:
            raise RoleTableError(f"cannot read the role table {source!r}: {e.strerror}; set proxy.roles") from e
        except msgspec.DecodeError as e:
            raise RoleTableError(f"the role table {source!r} is wrong: {e}") from e
        return cls(table.rule, table.role_header, table.caller_headers)

    def caller(self, headers: Mapping[str, str]) -> tuple[str, ...]:
        """Which agent of an execution asks, as far as its headers say."""
        return tuple(headers[name] for name in self.caller_headers if name in headers)

    def role(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[str, bool]:
        """Return (role, whether a rule or the header named it); headers: lower-case or case-insensitive names."""
        if _ROLE.fullmatch(named := headers.get(self.role_header, "")):
            return named, True
        for rule in self.rules:
            if rule.matches(headers, conversation):
                return rule.role, True
        return "main", False


def tool_names(tools: Sequence[dict[str, Any]]) -> set[str]:
    """Names of tool definitions, in OpenAI's form or bare."""
    return {str(t.get("function", t).get("name")) if isinstance(t.get("function", t), dict) else "" for t in tools}


def _has(value: str, wanted: Mapping[str, str]) -> bool:
    try:
        fields = json.loads(value)
    except ValueError:
        return False
    return isinstance(fields, dict) and all(str(fields.get(k)) == v for k, v in wanted.items())
