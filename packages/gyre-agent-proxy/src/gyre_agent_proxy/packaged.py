"""Renderers of the `renderers` package, for the models it knows by hand; imported only when one is asked for (2 s).

That package reads whole turns only, so their reasoning and text are not streamed: they come at the end, in one piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from gyre_agent_proxy.conversation import Message
from gyre_agent_proxy.errors import ModelError, RenderError
from gyre_agent_proxy.parse import Parsed
from gyre_agent_proxy.render import Extension, Renderer, Tools
from gyre_agent_proxy.template import as_dicts, protected
from gyre_agent_proxy.unfolding import as_json, cut_at_stop
from gyre_agent_proxy.vocabulary import Vocabulary

log = logging.getLogger(__name__)


class _Tokenizer:
    """The tokenizer surface that package asks for; honours `Vocabulary`'s marks."""

    unk_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary, name: str, eos: int | None) -> None:
        self.name_or_path = name
        self.eos_token_id = eos
        self._vocabulary = vocabulary
        self.all_special_tokens = list(vocabulary.special)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._vocabulary.encode(text)

    def decode(self, ids: int | Iterable[int], *_: Any, **__: Any) -> str:
        return self._vocabulary.decode([ids] if isinstance(ids, int) else ids)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, str):
            return self._vocabulary.id(tokens)
        return [self._vocabulary.id(t) for t in tokens]

    def convert_ids_to_tokens(self, ids: int | list[int]) -> Any:
        if isinstance(ids, int):
            return self._vocabulary.piece(ids)
        return [self._vocabulary.piece(i) for i in ids]


def packaged_renderer(vocabulary: Vocabulary, kind: str, name: str, stop_ids: list[int]) -> Renderer | None:
    """The renderer called `kind`, or with "auto" the one made for the model `name`; None if there is none for it.

    Raises `ModelError`.
    """
    try:
        from renderers import config_from_name, create_renderer
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError as e:
        raise ModelError(f"template {kind!r} needs the package `renderers`: {e}; install it") from e
    if kind in ("auto", "chatml"):
        known = MODEL_RENDERER_MAP.get(name) if kind == "auto" else None
        if known is None:
            return None
        kind = known
    tokenizer = _Tokenizer(vocabulary, name, stop_ids[0] if stop_ids else None)
    try:
        # Whatever the template would strip from history stays: it was sampled and is on the path.
        config = type(config_from_name(kind))(thinking_retention="all")
        made = create_renderer(tokenizer, config)
    except Exception as e:  # that package raises many kinds, pydantic's included
        raise ModelError(f"template {kind!r} cannot be used with this model: {e}; set proxy.template") from e
    return PackagedRenderer(made, vocabulary, kind, stop_ids)


class PackagedRenderer:
    """A `Renderer` over one of that package's."""

    def __init__(self, made: Any, vocabulary: Vocabulary, kind: str, stop_ids: list[int]) -> None:
        self.vocabulary = vocabulary
        self.hash = f"renderers:{kind}"
        self.plain = False
        self.shows_tools = True
        self._made = made
        self.stop_ids = tuple(dict.fromkeys([*made.get_stop_token_ids(), *stop_ids]))

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        try:
            ids: list[int] = self._made.render_ids(
                as_dicts(list(messages), self.vocabulary), tools=self._tools(tools), add_generation_prompt=True
            )
        except Exception as e:
            raise RenderError(f"the model's renderer refuses this conversation: {e}") from e
        return ids

    def extend(
        self, prompt: Sequence[int], output: Sequence[int], turn: Message, messages: Sequence[Message], tools: Tools
    ) -> Extension | None:
        before = [int(i) for i in prompt]
        sampled = [int(i) for i in output]
        try:
            rendered = self._made.bridge_to_next_turn(
                before, sampled, as_dicts(list(messages), self.vocabulary), tools=self._tools(tools)
            )
        except Exception as e:
            raise RenderError(f"the model's renderer refuses this conversation: {e}") from e
        if rendered is None:
            return None
        ids: list[int] = rendered.token_ids
        path = before + sampled
        if ids[: len(path)] != path:
            log.warning("%s gave an extension that is none", self.hash)
            return None
        rest = ids[len(path) :]
        closing = 0
        if not (sampled and sampled[-1] in self.stop_ids):
            closing = next((i + 1 for i, t in enumerate(rest) if t in self.stop_ids), 0)
        return Extension(rest[:closing], rest[closing:])

    def thinking(self, prompt: Sequence[int]) -> bool:
        return self.vocabulary.decode(prompt[-8:]).rstrip().endswith("<think>")

    def turn(self, message: Message, tools: Tools) -> list[int] | None:
        ask = Message(role="user", text="-")
        try:
            head: list[int] = self._made.render_ids(as_dicts([ask], self.vocabulary), add_generation_prompt=True)
            ids: list[int] = self._made.render_ids(as_dicts([ask, message], self.vocabulary))
        except Exception as e:
            raise RenderError(f"the model's renderer refuses this conversation: {e}") from e
        if ids[: len(head)] != head:
            return None
        body = ids[len(head) :]
        end = next((i + 1 for i in range(len(body) - 1, -1, -1) if body[i] in self.stop_ids), len(body))
        return body[:end]

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: Tools, stops: tuple[str, ...]) -> Parsed:
        sampled = [int(i) for i in output]
        try:
            found = self._made.parse_response(sampled, tools=self._tools(tools), prompt_ids=[int(i) for i in prompt])
        except Exception:  # a policy may sample anything; what that package cannot read is text
            log.exception("%s cannot read a turn of %d tokens, which stays text", self.hash, len(sampled))
            ids = sampled[:-1] if sampled and sampled[-1] in self.stop_ids else sampled
            return Parsed(text=cut_at_stop(self.vocabulary.decode(ids), stops)[0])
        calls, text = [], found.content or ""
        for call in found.tool_calls:
            if tools and call.name is not None and str(call.status).endswith("ok"):
                arguments = call.arguments
                said = arguments if isinstance(arguments, str) else as_json(arguments or {})
                calls.append((call.name, said, call.id))
            else:
                text += call.raw
        text, _ = cut_at_stop(text, stops)
        return Parsed(
            text=text,
            reasoning=found.reasoning_content,
            calls=tuple((n, a) for n, a, _ in calls),
            native_ids=tuple(i for *_, i in calls) if calls and all(i for *_, i in calls) else (),
        )

    def _tools(self, tools: Tools) -> list[dict[str, Any]] | None:
        # That package takes a function's definition without the {"type": "function"} around it or with it.
        found: list[dict[str, Any]] = protected(list(tools), self.vocabulary)
        return found or None
