"""An execution's history: which earlier call a request continues, and the exact ids of its prompt.

    request ─ restore ─▶ keys of its prefixes ─ attach ─▶ the deepest call whose whole path is a prefix of the request
                                                │ none: a new root
        prompt = path ids + close(turn) + rendered messages + generation prompt      (sampled ids are never re-encoded)

Assistant turns after the attach point that were sampled in this execution (known by call id, or by unique content) are
spliced in as the ids they were sampled as; others are encoded from text. All of a prompt is context, never a target.
`plan` changes nothing; `insert` does, once the answer exists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gyre_agent_proxy.conversation import Conversation, Message, digest, identities, identity, plain
from gyre_agent_proxy.errors import InvariantError
from gyre_agent_proxy.render import Renderer, Tools
from gyre_agent_proxy.restore import restore

Ids = NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class Node:
    """One answered call. Its path is its parent's path + `prompt` + `output`."""

    call: str
    parent: Node | None
    key: bytes  # of the prefix that ends with this call's answer
    depth: int  # messages in that prefix
    message: Message  # the answer
    prompt: Ids  # after the parent's path
    output: Ids
    prefix: int = field(init=False)  # ids of the parent's path

    def __post_init__(self) -> None:
        self.prefix = self.parent.length if self.parent is not None else 0

    @property
    def length(self) -> int:
        """Ids on the path."""
        return self.prefix + len(self.prompt) + len(self.output)

    def path(self) -> Ids:
        """Ids from the root to the end of this call's output."""
        parts: list[Ids] = []
        node: Node | None = self
        while node is not None:
            parts += [node.output, node.prompt]
            node = node.parent
        return np.concatenate(parts[::-1])


@dataclass(slots=True, frozen=True)
class Plan:
    """What a request becomes; `prompt` is the whole prompt, `inserted` are spans of it after `prefix` (relative)."""

    parent: Node | None
    prefix: int
    prompt: Ids
    inserted: tuple[tuple[int, int], ...]
    key: bytes  # of the request's messages
    depth: int
    spliced: int = 0  # turns put in as sampled elsewhere in the execution
    foreign: int = 0  # assistant turns encoded from text
    forked: bool = False  # an earlier call was continued, but not provably as an extension: a new root
    restored: int = 0  # turns that came back changed and got their sampled form back

    def answered(self, answer: Message) -> bytes:
        """The key of the prefix that ends with `answer`."""
        return digest(self.key, identity(answer))


class History:
    """All calls of one execution."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._by_key: dict[bytes, list[Node]] = {}
        self._by_content: dict[bytes, list[Node]] = {}
        self._by_call_id: dict[str, Node] = {}
        self.calls = 0

    def plan(self, conversation: Conversation) -> Plan:
        """Return the prompt of `conversation`. Raises `RenderError` or `InvariantError`; changes nothing."""
        messages, restored = restore(conversation.messages, self._turn_of)
        keys = self._keys(messages, conversation.tools)
        node = self._attach(messages, keys)
        built = None
        if node is not None:
            built = _Builder(self, conversation.tools).continue_from(node, messages[node.depth :])
        forked = node is not None and built is None
        if built is None:
            node = None
            built = _Builder(self, conversation.tools).root(messages)
        path = built.start if node is not None else np.zeros(0, np.uint32)
        prompt = np.concatenate([path, np.asarray(built.ids, np.uint32)])
        plan = Plan(
            parent=node,
            prefix=len(path),
            prompt=prompt,
            inserted=tuple(built.inserted),
            key=keys[-1],
            depth=len(messages),
            spliced=built.spliced,
            foreign=built.foreign,
            forked=forked,
            restored=restored,
        )
        if node is not None and not np.array_equal(prompt[: node.length], node.path()):
            raise InvariantError(f"the prompt of a child of call {node.call!r} does not begin with that call's ids")
        return plan

    def insert(self, node: Node) -> None:
        """Add an answered call; its parent is already here."""
        self.calls += 1
        self._by_key.setdefault(node.key, []).append(node)
        self._by_content.setdefault(identity(node.message), []).append(node)
        for call in node.message.calls:
            self._by_call_id[call.id] = node

    def knows(self, call_id: str) -> bool:
        """Whether a turn with this tool call id was sampled here."""
        return call_id in self._by_call_id

    def known(self, message: Message) -> Node | None:
        """The call that sampled the assistant turn `message`, if its ids are certain."""
        sent = [c.id for c in message.calls]
        nodes = [n for n in map(self._by_call_id.get, sent) if n is not None]
        if nodes:
            return nodes[0] if sent == [c.id for c in nodes[0].message.calls] else None
        same = self._by_content.get(identity(message), [])
        same = [n for n in same if n.message.text == message.text] or same
        certain = same and all(np.array_equal(n.output, same[0].output) for n in same[1:])
        return same[0] if certain else None

    def _turn_of(self, call_id: str) -> Message | None:
        node = self._by_call_id.get(call_id)
        return None if node is None else node.message

    def _keys(self, messages: Sequence[Message], tools: Tools) -> list[bytes]:
        """keys[i] identifies tools, template and the first i messages."""
        keys = [digest("root", self._renderer.hash, json.dumps(tools, sort_keys=True, ensure_ascii=False))]
        for said in identities(messages):
            keys.append(digest(keys[-1], said))
        return keys

    def _attach(self, messages: Sequence[Message], keys: Sequence[bytes]) -> Node | None:
        for depth in range(len(messages), 0, -1):
            if messages[depth - 1].role != "assistant":
                continue
            fits = [(n, self._differences(n, messages)) for n in reversed(self._by_key.get(keys[depth], []))]
            if found := min((f for f in fits if f[1] is not None), key=lambda f: f[1] or 0, default=None):
                return found[0]
        return None

    def _differences(self, node: Node, messages: Sequence[Message]) -> int | None:
        """In how many turns the request's text differs, in white space, from the one on the node's path.

        None where the request means other turns that say the same: by their call ids or, without, by their reasoning.
        """
        differ = 0
        at: Node | None = node
        while at is not None:
            sent, made = messages[at.depth - 1], at.message
            ids = [c.id for c in sent.calls]
            if not ids or ids != [c.id for c in made.calls]:
                if any(i in self._by_call_id for i in ids):
                    return None
                thought = plain(sent.reasoning or "")
                if thought and thought != plain(made.reasoning or ""):
                    return None
            differ += sent.text != made.text
            at = at.parent
        return differ


class _Builder:
    """Puts one prompt together from rendered text and sampled ids."""

    def __init__(self, history: History, tools: Tools) -> None:
        self._history = history
        self._renderer = history._renderer
        self._tools = tools
        self.start: Ids = np.zeros(0, np.uint32)  # the path that is continued
        self.ids: list[int] = []  # after it
        self.inserted: list[tuple[int, int]] = []
        self.spliced = 0
        self.foreign = 0

    def continue_from(self, node: Node, messages: Sequence[Message]) -> _Builder | None:
        """Extend the path of `node`; None where no extension is proven."""
        self.start = node.path()
        before = self.start[: node.length - len(node.output)]
        return self._extend(before, node.output, node.message, messages)

    def root(self, messages: Sequence[Message]) -> _Builder:
        """A prompt that continues no call."""
        first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        if 0 < first < len(messages):
            self.ids = self._renderer.render(messages[:first], self._tools)
            if (built := self._turn(messages[first], messages[first + 1 :])) is not None:
                return built
        elif first == len(messages):
            self.ids = self._renderer.render(messages, self._tools)
            return self
        # The template allows nothing better: all of it from text.
        self.inserted, self.spliced = [], 0
        self.foreign = sum(m.role == "assistant" for m in messages)
        self.ids = self._renderer.render(messages, self._tools)
        return self

    def _extend(
        self, prompt: Sequence[int] | Ids, output: Sequence[int] | Ids, turn: Message, messages: Sequence[Message]
    ) -> _Builder | None:
        end = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        extension = self._renderer.extend(prompt, output, turn, messages[:end], self._tools)  # type: ignore[arg-type]
        if extension is None:
            return None
        if extension.closing:
            self.inserted.append((len(self.ids), len(self.ids) + len(extension.closing)))
        self.ids += extension.closing + extension.tail
        return self if end == len(messages) else self._turn(messages[end], messages[end + 1 :])

    def _turn(self, turn: Message, messages: Sequence[Message]) -> _Builder | None:
        """Put in one assistant turn and what follows it."""
        known = self._history.known(turn)
        if known is not None:
            ids, turn = known.output.tolist(), known.message
            self.spliced += 1
        else:
            encoded = self._renderer.turn(turn, self._tools)
            if encoded is None:
                return None
            ids = encoded
            self.foreign += 1
        before = np.concatenate([self.start, np.asarray(self.ids, np.uint32)])
        self.ids += ids
        return self._extend(before, ids, turn, messages)
