"""What a harness sends back, put into the form it was sampled in.

A call id that was made here names the turn that made it, whatever else became of that turn on its way:

    its text or arguments were rewritten             they are as they were sampled
    it came in parts (its text apart from its calls, or a call, its result, the next call)     it is one turn again
    its results came in another order                they stand in the order of their calls, as the first time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gyre_agent_proxy.conversation import Message, ToolCall, identity, in_call_order, plain

TurnOf = Callable[[str], Message | None]  # the sampled turn that made a call id


def restore(messages: Sequence[Message], turn_of: TurnOf) -> tuple[list[Message], int]:
    """(the messages, how many turns had come back changed)."""
    found: list[Message] = []
    changed, at = 0, 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if message.role != "assistant" or not message.calls:
            found.append(message)
            continue
        turn = turn_of(message.calls[0].id)
        whole = None if turn is None else _gather(messages, at - 1, turn)
        if turn is None or whole is None:
            calls = tuple(_original(call, turn_of) for call in message.calls)
            found.append(msgspec.structs.replace(message, calls=calls))
            continue
        end, results = whole
        parts = end > at
        if not message.text and plain(turn.text):
            if found and _is_text_of(turn, found[-1]):
                before, parts = found.pop(), True
                message = msgspec.structs.replace(message, reasoning=message.reasoning or before.reasoning)
            elif end < len(messages) and not results and _is_text_of(turn, messages[end]):
                end, parts = end + 1, True
        as_it_was = (message.text, message.calls) == (turn.text, turn.calls)
        changed += parts or not (as_it_was or identity(message) == identity(turn))
        found += [msgspec.structs.replace(turn, reasoning=message.reasoning), *results]
        at = end
    return in_call_order(found), changed


def _gather(messages: Sequence[Message], at: int, turn: Message) -> tuple[int, list[Message]] | None:
    """Where the parts of `turn` that begin at `at` end, and the results between them; None if a call is missing."""
    missing = [call.id for call in turn.calls]
    ours = set(missing)
    results: list[Message] = []
    for end in range(at, len(messages)):
        message = messages[end]
        ids = [call.id for call in message.calls]
        if message.role == "assistant" and ids and missing[: len(ids)] == ids:
            missing = missing[len(ids) :]
            if not missing:
                return end + 1, results
        elif message.role == "tool" and message.call_id in ours:
            results.append(message)
        else:
            break
    return None


def _is_text_of(turn: Message, message: Message) -> bool:
    return message.role == "assistant" and not message.calls and plain(message.text) == plain(turn.text)


def _original(call: ToolCall, turn_of: TurnOf) -> ToolCall:
    turn = turn_of(call.id)
    return call if turn is None else next(c for c in turn.calls if c.id == call.id)
