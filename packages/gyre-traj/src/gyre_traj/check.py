"""The invariants of a call log, checked on the records themselves.

An error means that a record must not be trained on as it stands; a note means that something is unusual or missing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gyre_traj.errors import TrajError
from gyre_traj.log import Log
from gyre_traj.records import Call, unpack_logprobs
from gyre_traj.tree import Tree

_CERTAIN = 8  # as many log-probabilities of exactly 0, and nothing else, look like a placeholder for missing ones


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing found; `call` is empty when it concerns the whole log."""

    level: str  # error | note
    text: str
    call: str = ""


def check_log(log: Log) -> tuple[Finding, ...]:
    """Check a log: child prompts begin with their parent's ids, lengths agree, version spans cover outputs."""
    found: list[Finding] = []
    if log.torn:
        found.append(Finding(level="note", text=f"{log.torn} bytes at the end are no whole record"))
    if log.skipped:
        found.append(Finding(level="note", text=f"{log.skipped} records are of kinds this release does not know"))
    if log.header is None:
        found.append(Finding(level="error", text="no header: the log names no execution"))
    tree = Tree(log.header.execution if log.header else log.calls[0].execution if log.calls else "")
    for call in log.calls:
        try:
            tree.add(call, log.delivered.get(call.call, False))
        except TrajError as error:
            found.append(Finding(level="error", call=call.call, text=str(error)))
        found.extend(_check_call(call))
    for call_id, reason in tree.untrainable.items():
        level = "error" if reason.startswith("log-probabilities") else "note"  # others say what happened
        found.append(Finding(level=level, call=call_id, text=f"not trainable: {reason}"))
    known = {call.call for call in log.calls}
    found.extend(
        Finding(level="error", call=call_id, text="delivered, but never recorded")
        for call_id in log.delivered
        if call_id not in known
    )
    if undelivered := sum(not log.delivered.get(call_id, False) for call_id in known):
        found.append(Finding(level="note", text=f"{undelivered} calls have no record of being delivered"))
    return tuple(found)


def _check_call(call: Call) -> Iterator[Finding]:
    def error(text: str) -> Finding:
        return Finding(level="error", call=call.call, text=text)

    size, prompt = len(call.output) // 4, len(call.prompt) // 4
    at = 0
    for span in call.versions:
        if span.start != at:
            yield error(f"version spans do not join: one starts at token {span.start}, expected {at}")
        at = span.end
    if call.versions and at != size:
        yield error(f"version spans end at token {at}, the output at {size}")
    if not call.versions and call.logprobs:
        yield Finding(level="note", call=call.call, text="no weight version is known for its output")
    if any(not 0 <= start <= end <= prompt for start, end in call.inserted):
        yield error(f"inserted spans {call.inserted!r} reach outside its {prompt} prompt ids")
    if call.attempts and sum(attempt.tokens for attempt in call.attempts) != size:
        yield error(f"its attempts say {sum(a.tokens for a in call.attempts)} tokens, the output has {size}")
    if len(call.logprobs) % 4 == 0:
        logprobs = unpack_logprobs(call.logprobs)
        if len(logprobs) >= _CERTAIN and not logprobs.any():
            yield Finding(level="note", call=call.call, text="every log-probability is exactly 0: were they recorded?")
