"""The tools of a Responses request: what the model is offered, and whose call each of its calls is.

| type          | the model sees                                     | its call goes out as               |
| ------------- | -------------------------------------------------- | ---------------------------------- |
| `function`    | the function                                       | `function_call`                    |
| `custom`      | a function with one string argument, `input`       | `custom_tool_call`                 |
| `namespace`   | its tools, each as `namespace__name`               | as above, with `namespace`         |
| `local_shell` | a function `local_shell`                           | `local_shell_call`                 |
| hosted ones   | nothing: nobody here could run them                |                                    |

A name that two tools would share is numbered for the later one (`name_2`); tools outside namespaces choose first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre_agent_proxy.conversation import ToolCall
from gyre_agent_proxy.errors import BadRequest

_ANYTHING: dict[str, Any] = {"type": "object", "properties": {}}
_SHELL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}


class Tool(msgspec.Struct, frozen=True):
    """One tool as the harness names it."""

    kind: str  # function | custom | local_shell
    name: str
    namespace: str | None = None


class ShellAction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="exec"):
    """What a `local_shell_call` runs."""

    command: list[str]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class Offer:
    """The tools of one request."""

    def __init__(self, raw: list[dict[str, Any]]) -> None:
        """Read tool definitions. Raises `BadRequest`."""
        self.definitions: tuple[dict[str, Any], ...] = ()  # for the model, in Chat Completions' form
        self.left_out: list[dict[str, Any]] = []  # not offered
        self.echo: list[dict[str, Any]] = []  # for the response object
        self._shown: dict[Tool, str] = {}
        self._by_name: dict[str, Tool] = {}
        found: list[tuple[Tool, dict[str, Any]]] = []
        for i, definition in enumerate(raw):
            found += self._read(definition, f"tools[{i}]")
        for tool, _ in sorted(found, key=lambda t: t[0].namespace is not None):
            self._name(tool)
        taken: set[Tool] = set()
        for tool, function in found:
            if tool not in taken:  # a tool that was sent twice is offered once
                taken.add(tool)
                self.definitions += ({"type": "function", "function": {"name": self._shown[tool], **function}},)

    def shown(self, tool: Tool) -> str:
        """The name under which the model knows `tool`, offered now or not."""
        return self._shown.get(tool) or _joined(tool)

    def item(self, call: ToolCall, key: str, status: str) -> dict[str, Any]:
        """The output item of one of the model's calls; `key` makes its id unique."""
        tool = self._by_name.get(call.name, Tool("function", call.name))
        ends: dict[str, Any] = {"call_id": call.id, "status": status}
        if tool.kind == "local_shell" and (action := _action(call.arguments)) is not None:
            return {"type": "local_shell_call", "id": f"lsh_{key}", "action": action, **ends}
        ends |= {"name": tool.name} | ({} if tool.namespace is None else {"namespace": tool.namespace})
        if tool.kind == "custom":
            return {"type": "custom_tool_call", "id": f"ctc_{key}", "input": _input(call.arguments), **ends}
        return {"type": "function_call", "id": f"fc_{key}", "arguments": call.arguments, **ends}

    def _read(
        self, tool: dict[str, Any], where: str, space: str | None = None
    ) -> Iterator[tuple[Tool, dict[str, Any]]]:
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise BadRequest(f"{where}.type: expected a string, got {kind!r:.80}", "tools")
        shown = tool
        match kind:
            case "function":
                parameters = _optional(tool, "parameters", dict, where)
                name, description = _name_of(tool, where), _optional(tool, "description", str, where)
                shown = {"strict": True, "description": None, **tool, "parameters": parameters}
                function = {"description": description or "", "parameters": parameters or _ANYTHING}
                yield Tool(kind, name, space), function
            case "custom":
                yield Tool(kind, _name_of(tool, where), space), _freeform(tool, where)
            case "local_shell" if space is None:
                yield Tool(kind, kind), {"description": "Run a command on the user's machine.", "parameters": _SHELL}
            case "namespace" if space is None:
                yield from self._read_namespace(tool, where)
            case _:
                self.left_out.append(tool)
        if space is None:
            self.echo.append(shown)

    def _read_namespace(self, tool: dict[str, Any], where: str) -> Iterator[tuple[Tool, dict[str, Any]]]:
        space, about = _name_of(tool, where), _optional(tool, "description", str, where)
        members = _optional(tool, "tools", list, where) or []
        if not all(isinstance(m, dict) for m in members):
            raise BadRequest(f"{where}.tools: expected tool definitions, got {members!r:.80}", "tools")
        for i, member in enumerate(members):
            for found, function in self._read(member, f"{where}.tools[{i}]", space):
                if about:  # said once, with the first of its tools
                    function = function | {"description": f"{space}: {about}\n\n{function['description']}".rstrip()}
                    about = None
                yield found, function

    def _name(self, tool: Tool) -> None:
        if tool in self._shown:
            return
        name, n = _joined(tool), 1
        while name in self._by_name:
            n += 1
            name = f"{_joined(tool)}_{n}"
        self._shown[tool], self._by_name[name] = name, tool


def call_of(item: dict[str, Any], call_id: str, offer: Offer, where: str) -> ToolCall:
    """The call an input item repeats, under the name the model knows. Raises `BadRequest`."""
    kind = item["type"]
    if kind == "local_shell_call":
        action = item.get("action")
        if not isinstance(action, dict):
            raise BadRequest(f"{where}.action: expected an object, got {action!r:.80}", where)
        said = {k: v for k, v in action.items() if k in _SHELL["properties"] and v is not None}
        return ToolCall(id=call_id, name=offer.shown(Tool("local_shell", "local_shell")), arguments=_json(said))
    space = item.get("namespace")
    space = space if isinstance(space, str) and space else None
    if kind == "custom_tool_call":
        said = {"input": _optional(item, "input", str, where) or ""}
        tool = Tool("custom", _name_of(item, where), space)
        return ToolCall(id=call_id, name=offer.shown(tool), arguments=_json(said))
    arguments = item.get("arguments") or ""
    if not isinstance(arguments, str):
        arguments = _json(arguments)
    return ToolCall(id=call_id, name=offer.shown(Tool("function", _name_of(item, where), space)), arguments=arguments)


def _joined(tool: Tool) -> str:
    return tool.name if tool.namespace is None else f"{tool.namespace}__{tool.name}"


def _freeform(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A custom tool as a function: the grammar it asks for is described, not enforced."""
    description = _optional(tool, "description", str, where) or ""
    form = tool.get("format")
    if isinstance(form, dict) and isinstance(grammar := form.get("definition"), str):
        description += f"\n\nThe input follows this grammar ({form.get('syntax')}):\n{grammar}"
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"description": description.strip(), "parameters": parameters}


def _input(arguments: str) -> str:
    """The text a model gave to a custom tool; what is not the one argument asked for is passed on as it is."""
    try:
        said = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments
    text = said.get("input") if isinstance(said, dict) and len(said) == 1 else None
    return text if isinstance(text, str) else arguments


def _action(arguments: str) -> dict[str, Any] | None:
    """The action of a shell call, or None where the model's arguments are none: then its call is a `function_call`."""
    try:
        said = msgspec.json.decode(arguments)
        action = msgspec.convert({"type": "exec", **said}, ShellAction)
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError, RecursionError):
        return None
    return {"env": {}, **msgspec.to_builtins(action)}


def _name_of(item: dict[str, Any], where: str) -> str:
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name: expected a name, got {name!r:.80}", where)
    return name


def _optional(item: dict[str, Any], field: str, kind: type, where: str) -> Any:
    value = item.get(field)
    if value is not None and not isinstance(value, kind):
        raise BadRequest(f"{where}.{field}: expected {kind.__name__}, got {value!r:.80}", where)
    return value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
