"""What a Chat Completions message, choice and response say, as OpenAI, vLLM and SGLang write them."""

from __future__ import annotations

import json
from typing import Any

from gyre_traj.errors import BadLine
from gyre_traj.records import CERTAIN, Span

_MISSING = -9999.0  # what vLLM writes for a log-probability it does not have


def sampled_ids(
    response: dict[str, Any], choice: dict[str, Any], i: int
) -> tuple[list[int] | None, list[float] | None]:
    """Output ids and their log-probabilities, as far as the engine gave them."""
    triples = at(choice, "meta_info", "output_token_logprobs")
    content = at(choice, "logprobs", "content")
    framed = at(response, "sglext", "output_ids")
    ids = first_ids(
        choice.get("token_ids"),
        choice.get("response_token_ids"),
        framed[i] if isinstance(framed, list) and i < len(framed) else None,
        _second(triples) if isinstance(triples, list) else None,
        _named(content) if isinstance(content, list) else None,
    )
    logprobs: list[float] | None = None
    try:
        if isinstance(content, list):
            logprobs = [float(entry["logprob"]) for entry in content]
        elif isinstance(triples, list):
            logprobs = [float(triple[0]) for triple in triples]
    except (IndexError, KeyError, TypeError, ValueError):
        logprobs = [float("nan")]
    return ids, logprobs


def flaw(sampled: list[int] | None, logprobs: list[float] | None) -> str:
    """Why an answer is no loss target; empty when it is one."""
    if sampled is None:
        return "token ids were not logged"
    if logprobs is None:
        return "no log-probabilities"
    if len(logprobs) != len(sampled):
        return "not as many log-probabilities as tokens"
    if any(not value > _MISSING for value in logprobs):
        return "some log-probabilities are missing"
    if any(value > CERTAIN for value in logprobs):
        return "log-probabilities above 0"
    return ""


def first_of(*values: Any, kinds: Any) -> Any:
    """The first value of these kinds, or None."""
    return next((value for value in values if isinstance(value, kinds)), None)


def _second(triples: list[Any]) -> list[Any] | None:
    """Ids of [log-probability, id, …] each; None when they are something else."""
    pairs = all(isinstance(triple, list) and len(triple) > 1 for triple in triples)
    return [triple[1] for triple in triples] if pairs else None


def _named(content: list[Any]) -> list[int] | None:
    """Ids of tokens that are named `token_id:N`, or carry a `token_id`."""
    ids = []
    for entry in content:
        number = entry.get("token_id") if isinstance(entry, dict) else None
        name = entry.get("token") if isinstance(entry, dict) else None
        if number is None and isinstance(name, str) and name.startswith("token_id:"):
            number = name.removeprefix("token_id:")
        if number is None or not str(number).isdecimal():
            return None
        ids.append(int(number))
    return ids


def first_ids(*candidates: Any) -> list[int] | None:
    """The first that is there; what is no list of ids is refused."""
    for found in candidates:
        if found is None:
            continue
        if not isinstance(found, list) or not all(isinstance(i, int) and 0 <= i < 1 << 32 for i in found):
            raise BadLine(f"expected token ids to be a list of numbers below 2^32, got {found!r:.80}")
        return found
    return None


def weight_versions(response: dict[str, Any], choice: dict[str, Any], size: int) -> tuple[Span, ...]:
    """Weight versions of `size` sampled tokens, where the engine counts them; () otherwise."""
    if not size:
        return ()
    for meta in (choice.get("meta_info"), response.get("metadata")):
        spans = at(meta, "weight_versions") or [{"version": at(meta, "weight_version"), "start": 0, "end": size}]
        try:
            found = tuple(Span(int(s["version"]), int(s["start"]), min(size, int(s["end"]))) for s in spans)
        except (KeyError, TypeError, ValueError):
            continue
        joined = [0, *(span.end for span in found)] == [*(span.start for span in found), size]
        if joined and all(span.start <= span.end and span.version < 1 << 31 for span in found):
            return found
    return ()


def chat_message(message: Any) -> dict[str, Any]:
    """A message as chat templates expect it: text for content, objects for the arguments of calls."""
    if not isinstance(message, dict):
        raise BadLine(f"expected a message to be an object, got {message!r:.80}")
    made = {key: value for key, value in message.items() if value is not None}
    made.setdefault("role", "assistant")
    content = made.get("content", "")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    made["content"] = content
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}
            for call in calls
            if isinstance(call, dict) and isinstance(function := call.get("function"), dict)
        ]
    return made


def _arguments(raw: Any) -> Any:
    try:
        read = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        return raw
    return read if isinstance(read, dict) else raw


def at(value: Any, *keys: str) -> Any:
    """value[key][key]…, or None where something is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
