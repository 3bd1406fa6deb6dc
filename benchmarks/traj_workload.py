"""The execution that `traj.py` measures: calls of a coding agent whose history branches, made from a seed.

    main       system, task ─ out ─ tool result ─ out ─ … ─┬─ out ─ summary asked for ─ out
                                                           ├─ out    retry: the same prompt again
                                                           └─ tool result shortened, later turns as context ─ out
    restart    system, task, summary ─ out ─ …               compaction: a new context
    sub-agent  system', sub-task ─ out ─ …                   a root of its own

Everything is held as what each call adds, so that each peer can be fed in its own form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre_traj import Call, Tree, pack_ids, pack_logprobs

Ids = NDArray[np.uint32]

VOCABULARY = 150_000
GENERATION = np.array([151_644, 77_091, 198], dtype=np.uint32)  # a template's opening of the assistant's turn


class Message(NamedTuple):
    """One message of a prompt as the template lays it out; `key` is equal where messages are the same."""

    kind: str  # system | user | tool | assistant
    key: int
    ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call: the messages it adds to the conversation of `parent` and its answer, and what it sampled."""

    index: int
    role: str
    parent: int | None  # the turn whose whole prompt + output this prompt begins with
    prefix: int  # length of that
    messages: tuple[Message, ...]
    output: Ids
    logprobs: NDArray[np.float32]

    @property
    def name(self) -> str:
        return f"call-{self.index:04}"

    @property
    def prompt(self) -> Ids:
        """Ids after the first `prefix`."""
        return np.concatenate([*(message.ids for message in self.messages), GENERATION])

    @property
    def end(self) -> int:
        """Length of the whole prompt + output."""
        return self.prefix + sum(len(m.ids) for m in self.messages) + len(GENERATION) + len(self.output)


class _Growth:
    """Turns so far, with lengths in units of `scale`."""

    def __init__(self, seed: int, scale: float) -> None:
        self.random = np.random.default_rng([seed, 0])  # what happens, and in which proportions
        self.content = np.random.default_rng([seed, 1])
        self.scale = scale
        self.turns: list[Turn] = []
        self.keys = 0

    def ids(self, units: float, spread: float) -> Ids:
        length = units * self.scale * self.random.lognormal(-spread * spread / 2, spread)
        return self.content.integers(0, VOCABULARY, max(2, round(length)), dtype=np.uint32)

    def message(self, kind: str, units: float, spread: float = 0.2) -> Message:
        return self.known(kind, self.ids(units, spread))

    def known(self, kind: str, ids: Ids) -> Message:
        self.keys += 1
        return Message(kind, self.keys, ids)

    def tool(self) -> Message:
        return self.message("tool", 2100, 1.1)  # mostly short, now and then a whole file

    def call(self, role: str, parent: Turn | None, *messages: Message) -> Turn:
        output = self.ids(400, 0.7)
        logprobs = -self.content.exponential(0.4, len(output)).astype(np.float32)
        at, prefix = (parent.index, parent.end) if parent else (None, 0)
        self.turns.append(Turn(len(self.turns), role, at, prefix, messages, output, logprobs))
        return self.turns[-1]

    def rewrite(self, head: Turn, back: int) -> Turn:
        """Shorten a tool result `back` turns ago; what followed it comes again, as context."""
        tail: list[Turn] = []
        kept = head
        while len(tail) < back and kept.parent is not None:
            tail.insert(0, kept)
            kept = self.turns[kept.parent]
        if not tail:
            return self.call("main", head, self.tool())
        again: list[Message] = []
        for turn in tail:
            again += [*turn.messages, self.known("assistant", np.concatenate([GENERATION, turn.output]))]
        first = again[0].ids
        again[0] = self.known("tool", np.concatenate([first[: max(1, len(first) // 2)], self.ids(20, 0.2)]))
        return self.call("main", kept, *again, self.tool())


def _grow(calls: int, seed: int, scale: float) -> list[Turn]:
    growth = _Growth(seed, scale)
    random = growth.random
    branches = max(4, round(0.05 * calls))
    agents = branches // 4
    agent_calls = max(1, min(8, calls // 40))
    steps = calls - agents * agent_calls
    compaction = steps * 17 // 20
    places = random.permutation(np.arange(6, steps - 1))
    places = places[(places != compaction) & (places != compaction + 1) & (places != compaction + 2)]
    retries, rewrites, starts = np.split(places[: branches - 1], [(branches - 1 - agents) // 2, branches - 1 - agents])
    system, task = growth.message("system", 6000), growth.message("user", 1500)
    agent_system = growth.message("system", 3000)
    head = growth.call("main", None, system, task)
    for step in range(1, steps):
        if step == compaction:
            growth.call("main-summary", head, growth.tool(), growth.message("user", 200))
        elif step == compaction + 1:
            head = growth.call("main", None, system, task, growth.message("user", 2500))
        elif step in retries and head.parent is not None:
            head = growth.call("main", growth.turns[head.parent], *head.messages)
        elif step in rewrites:
            head = growth.rewrite(head, int(random.integers(1, 5)))
        else:
            head = growth.call("main", head, growth.tool())
        if step in starts:
            agent = growth.call("sub-agent", None, agent_system, growth.message("user", 800))
            for _ in range(agent_calls - 1):
                agent = growth.call("sub-agent", agent, growth.tool())
    return growth.turns


def execution(calls: int = 400, tokens: int = 1_000_000, seed: int = 0) -> list[Turn]:
    """Return `calls` turns of about `tokens` unique ids in all; 5 % of them branch."""
    tree = Tree("bench")
    for turn in _grow(calls, seed, 1.0):
        tree.add(record(turn))
    return _grow(calls, seed, tokens / tree.tokens_unique)


def chain(calls: int = 400, tokens: int = 1_000_000, seed: int = 0) -> list[Turn]:
    """Return turns of one thread without branches, each adding the same number of ids."""
    random = np.random.default_rng(seed)
    size, turns, prefix = tokens // calls, [], 0
    for index in range(calls):
        ids = random.integers(0, VOCABULARY, size - len(GENERATION), dtype=np.uint32)
        message, output = Message("tool" if index else "user", index, ids[: size * 5 // 6]), ids[size * 5 // 6 :]
        logprobs = np.full(len(output), -0.5, dtype=np.float32)
        turns.append(Turn(index, "main", index - 1 if index else None, prefix, (message,), output, logprobs))
        prefix = turns[-1].end
    return turns


def record(turn: Turn, execution: str = "bench") -> Call:
    """The turn as a call record: what it adds to its parent."""
    return Call(
        call=turn.name,
        execution=execution,
        role=turn.role,
        parent=None if turn.parent is None else f"call-{turn.parent:04}",
        prefix=turn.prefix,
        prompt=pack_ids(turn.prompt),
        output=pack_ids(turn.output),
        logprobs=pack_logprobs(turn.logprobs),
        started=float(turn.index),
    )


def whole_records(turns: list[Turn]) -> Iterator[tuple[Turn, Call]]:
    """Each turn as a call record with its whole prompt and no parent."""
    held: dict[int, bytes] = {}
    last = _last_use(turns)
    for turn in turns:
        prompt = (held[turn.parent] if turn.parent is not None else b"") + pack_ids(turn.prompt)
        output = pack_ids(turn.output)
        yield (
            turn,
            Call(
                call=turn.name,
                execution="bench",
                role=turn.role,
                prompt=prompt,
                output=output,
                logprobs=pack_logprobs(turn.logprobs),
                started=float(turn.index),
            ),
        )
        _hold(held, last, turn, prompt + output)


def lists(turns: list[Turn]) -> Iterator[tuple[Turn, list[int], list[int], list[float]]]:
    """Each turn with its whole prompt, output and log-probabilities as Python lists.

    Prompts of one thread share their int objects, and nothing is kept here once no later turn needs it: what is left
    in memory is what the consumer keeps.
    """
    held: dict[int, list[int]] = {}
    last = _last_use(turns)
    for turn in turns:
        prompt = (held[turn.parent] if turn.parent is not None else []) + turn.prompt.tolist()
        output = turn.output.tolist()
        yield turn, prompt, output, turn.logprobs.tolist()
        _hold(held, last, turn, prompt + output)


def _last_use(turns: list[Turn]) -> dict[int, int]:
    return {turn.parent: turn.index for turn in turns if turn.parent is not None}


def _hold[T](held: dict[int, T], last: dict[int, int], turn: Turn, ids: T) -> None:
    if turn.parent is not None and last[turn.parent] == turn.index:
        del held[turn.parent]
    if turn.index in last:
        held[turn.index] = ids
