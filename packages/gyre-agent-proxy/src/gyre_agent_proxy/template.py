"""A model's chat template: Jinja in, text out, as Hugging Face models expect it; sandboxed, without transformers."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

from gyre_agent_proxy.conversation import Message, ToolCall
from gyre_agent_proxy.errors import ModelError, RenderError
from gyre_agent_proxy.vocabulary import Vocabulary

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'You may call functions. Their definitions, one JSON object a line, are within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nWrite a call as one JSON object with "name" and "arguments" within <tool_call></tool_call>.' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Template:
    """One compiled chat template."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        """variables: what the template may name beside messages and tools (bos_token …). Raises `ModelError`."""
        from jinja2 import TemplateError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        today = datetime.datetime.now()  # fixed for the process: a prompt must not change with the clock
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = today.strftime
        try:
            self._template = environment.from_string(source)
            self._reads = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as e:
            raise ModelError(f"the model's chat template is not valid Jinja: {e}") from e
        self._variables = variables
        self.hash = hashlib.sha256(source.encode()).hexdigest()[:16]

    def mentions(self, variable: str) -> bool:
        """Whether the template reads `variable`."""
        return variable in self._reads

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, generate: bool) -> str:
        """Return the text of a conversation. Raises `RenderError` when the template refuses it."""
        try:
            text: str = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=generate, **self._variables
            )
        except RenderError:
            raise
        except Exception as e:  # whatever a template's expressions raise
            raise RenderError(f"the model's chat template refuses this conversation: {e}") from e
        return text


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise RenderError(f"the model's chat template refuses this conversation: {message}")


def load_template(path: Path, kind: str) -> tuple[str, dict[str, Any]]:
    """Return (template source, variables) of a model folder; kind: auto or chatml. Raises `ModelError`."""
    config = read_json(path / "tokenizer_config.json")
    variables = {k: _token(v) for k, v in config.items() if k.endswith("_token") and v is not None}
    if kind == "chatml":
        return CHATML, variables
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(), variables
    source = config.get("chat_template")
    if isinstance(source, list):
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ModelError(
            f"{str(path)!r} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "add one, or set proxy.template to 'chatml' or to a name of the renderers package"
        )
    return source, variables


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder; empty if the file is not there. Raises `ModelError`."""
    if not path.is_file():
        return {}
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot read {str(path)!r}: {e}") from e
    return data


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def protected(value: Any, vocabulary: Vocabulary) -> Any:
    """`value` (JSON) with every string in it protected."""
    match value:
        case str():
            return vocabulary.protect(value)
        case list() | tuple():
            return [protected(v, vocabulary) for v in value]
        case dict():
            return {vocabulary.protect(k): protected(v, vocabulary) for k, v in value.items()}
    return value


def as_dicts(messages: tuple[Message, ...] | list[Message], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Messages as templates expect them, every text protected."""
    return [_as_dict(m, vocabulary) for m in messages]


def _as_dict(message: Message, vocabulary: Vocabulary) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": vocabulary.protect(message.text)}
    if message.reasoning:
        found["reasoning_content"] = vocabulary.protect(message.reasoning)
    if message.calls:
        found["tool_calls"] = [_call(c, vocabulary) for c in message.calls]
    if message.call_id is not None:
        found["tool_call_id"] = message.call_id
    if message.name is not None:
        found["name"] = vocabulary.protect(message.name)
    return found


def _call(call: ToolCall, vocabulary: Vocabulary) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    if not isinstance(arguments, dict):
        arguments = call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": protected(function, vocabulary)}
