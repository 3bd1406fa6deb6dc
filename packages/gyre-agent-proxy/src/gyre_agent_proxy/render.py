"""Messages in, exact token ids out; and how a sampled turn is closed and continued.

    render    a whole prompt from text: roots only
    extend    what follows a sampled turn: closing ids (what the template writes at a turn's end and the model did not)
              and the ids of the messages after it, up to the next turn's first sampled token
    turn      a turn that was not sampled here, as ids that could have been sampled
    parse     what a sampled turn says

A template is text, a sampled turn is ids. `TemplateRenderer` renders the template twice around a sentinel that stands
for the turn: once with the turn last, once with the new messages after it. Only if the second text begins as the first
does, what is left over is the extension; otherwise there is none (None) and the caller renders a new root. The cost is
that of the new messages, not of the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gyre_agent_proxy.conversation import Message
from gyre_agent_proxy.errors import ModelError
from gyre_agent_proxy.parse import Parsed, parse
from gyre_agent_proxy.template import Template, as_dicts, load_template, protected, read_json
from gyre_agent_proxy.vocabulary import SENTINEL, Vocabulary

Tools = tuple[dict[str, Any], ...]

_ASK = {"role": "user", "content": "-"}  # stands for the history before a turn


class Extension(NamedTuple):
    """Ids that follow a sampled turn; `closing` end the turn on the template's behalf."""

    closing: list[int]
    tail: list[int]


class Renderer(Protocol):
    """How one model's conversations become ids; stateless."""

    vocabulary: Vocabulary
    stop_ids: tuple[int, ...]  # ids that end a turn
    hash: str  # of the template and its settings
    plain: bool  # a turn is what `parse` makes of its decoded ids, so it can be told as it unfolds
    shows_tools: bool  # the template mentions the tools on offer

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of a whole prompt, generation prompt included. Raises `RenderError`."""
        ...

    def extend(
        self, prompt: Sequence[int], output: Sequence[int], turn: Message, messages: Sequence[Message], tools: Tools
    ) -> Extension | None:
        """Ids that follow prompt + output, where `turn` is what output says; None where no extension is proven."""
        ...

    def thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside reasoning."""
        ...

    def turn(self, message: Message, tools: Tools) -> list[int] | None:
        """Ids of an assistant turn known only as text, its stop token included; None where it cannot be isolated."""
        ...

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: Tools, stops: tuple[str, ...]) -> Parsed:
        """What `output` says, up to the earliest of the `stops` strings."""
        ...


class TemplateRenderer:
    """A `Renderer` over the model's own chat template."""

    def __init__(self, vocabulary: Vocabulary, template: Template, stop_ids: Sequence[int]) -> None:
        self.vocabulary = vocabulary
        self.hash = template.hash
        self.plain = True
        self.shows_tools = template.mentions("tools")
        self._template = template
        base = self._around({"role": "assistant", "content": SENTINEL}, [], None, generate=False)
        if base is None:
            raise ModelError("the chat template does not write an assistant turn's content; set proxy.template")
        self._suffix = base  # what the template writes after a turn
        self._closing = vocabulary.encode(base)
        end = vocabulary.first_special(base)
        self.stop_ids = tuple(dict.fromkeys([*([] if end is None else [end]), *stop_ids]))

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        text = self._template.render(as_dicts(list(messages), self.vocabulary), self._tools(tools), generate=True)
        return self.vocabulary.encode(text)

    def extend(
        self, prompt: Sequence[int], output: Sequence[int], turn: Message, messages: Sequence[Message], tools: Tools
    ) -> Extension | None:
        (stand_in,) = as_dicts([Message(role="assistant", calls=turn.calls)], self.vocabulary)
        stand_in["content"] = SENTINEL
        offered = self._tools(tools)
        before = self._around(stand_in, [], offered, generate=False)
        after = self._around(stand_in, as_dicts(list(messages), self.vocabulary), offered, generate=True)
        if before is None or after is None or not before.endswith(self._suffix) or not after.startswith(before):
            return None
        return Extension(self._close(prompt, output), self.vocabulary.encode(after[len(before) :]))

    def _around(
        self, turn: dict[str, Any], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generate: bool
    ) -> str | None:
        """What the template writes after the text of `turn`; None if it does not write that text exactly once."""
        text = self._template.render([_ASK, turn, *messages], tools, generate=generate)
        return text.partition(SENTINEL)[2] if text.count(SENTINEL) == 1 else None

    def _tools(self, tools: Tools) -> list[dict[str, Any]] | None:
        found: list[dict[str, Any]] = protected(list(tools), self.vocabulary)
        return found or None

    def _close(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        if len(output) and self._closing and int(output[-1]) == self._closing[0]:
            return self._closing[1:]
        text = self.vocabulary.decode(output)
        opened = text.lstrip().startswith("<think>") or self.thinking(prompt)
        if opened and "</think>" not in text:
            return self.vocabulary.encode("\n</think>\n\n") + self._closing
        return list(self._closing)

    def thinking(self, prompt: Sequence[int]) -> bool:
        return self.vocabulary.decode(prompt[-8:]).rstrip().endswith("<think>")

    def turn(self, message: Message, tools: Tools) -> list[int] | None:
        dicts = as_dicts([message], self.vocabulary)
        head = self._template.render([_ASK], None, generate=True)
        after = self._around({"role": "assistant", "content": SENTINEL}, [_ASK], None, generate=False)
        text = self._template.render([_ASK, *dicts, _ASK], None, generate=False)
        if after is None or not after.startswith(self._suffix):
            return None
        if not text.startswith(head) or not text.endswith(after) or len(text) < len(head) + len(after):
            return None
        ids = self.vocabulary.encode(text[len(head) : len(text) - len(after)])
        return ids + self._closing[:1]

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: Tools, stops: tuple[str, ...]) -> Parsed:
        ids = output[:-1] if len(output) and int(output[-1]) in self.stop_ids else output
        text = self.vocabulary.decode(ids)
        return parse(text, tools=bool(tools), stops=stops, thinking=self.thinking(prompt))


def load_renderer(path: str | Path, kind: str = "auto", name: str = "") -> Renderer:
    """Return the renderer of the Hugging Face folder `path`.

    kind: "auto" (the `renderers` package where it knows the model `name`, such as "Qwen/Qwen3-8B", else the folder's
    own chat template), "chatml", or the name of a renderer of that package. Raises `ModelError`.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"model folder {str(path)!r} does not exist; set model.path, or give --model")
    vocabulary = Vocabulary(folder)
    stop_ids = _stop_ids(folder, vocabulary)
    if kind not in ("auto", "chatml") or "/" in name:
        from gyre_agent_proxy.packaged import packaged_renderer

        found = packaged_renderer(vocabulary, kind, name, stop_ids)
        if found is not None:
            return found
    source, variables = load_template(folder, "chatml" if kind == "chatml" else "auto")
    return TemplateRenderer(vocabulary, Template(source, variables), stop_ids)


def context_of(path: Path) -> int:
    """Tokens the model in folder `path` was made for, 0 where it does not say. Raises `ModelError`."""
    config = read_json(path / "config.json")
    found = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return found if isinstance(found, int) else 0


def _stop_ids(path: Path, vocabulary: Vocabulary) -> list[int]:
    """Ids at which the model's folder says generation ends."""
    found: list[int] = []
    for file in ("generation_config.json", "config.json"):
        ids = read_json(path / file).get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids] if isinstance(ids, int) else []
    eos = read_json(path / "tokenizer_config.json").get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if isinstance(eos, str) and (i := vocabulary.id(eos)) is not None:
        found.append(i)
    return list(dict.fromkeys(found))
