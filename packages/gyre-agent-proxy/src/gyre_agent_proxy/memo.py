"""Calls and their records: a call becomes a `gyre_traj` record, and records become the history they came from.

A record's `request` holds what the request said that nobody reads, the model's name and, under "gyre", a `Memo`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from gyre_agent_proxy.attempt import Attempt
from gyre_agent_proxy.client import sampling_params
from gyre_agent_proxy.conversation import Message, Reply, digest
from gyre_agent_proxy.history import Node, Plan
from gyre_agent_proxy.output import Output
from gyre_traj.log import Log
from gyre_traj.records import Call, pack_ids, pack_logprobs, unpack_ids

log = logging.getLogger(__name__)


class Memo(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Call` record carries under request["gyre"]: enough to rebuild the history after a restart."""

    key: str  # of the prefix that ends with the answer
    depth: int
    digest: str
    reply: Reply


def node_of(call: str, plan: Plan, output: Output, reply: Reply | None) -> Node:
    """The history's node of a call that was answered by `reply` (None: it was not)."""
    message = _message(reply)
    return Node(
        call=call,
        parent=plan.parent,
        key=plan.answered(message),
        depth=plan.depth + 1,
        message=message,
        prompt=plan.prompt[plan.prefix :].copy(),
        output=np.asarray(output.ids, np.uint32),
    )


def call_of(
    execution: str,
    attempt: Attempt,
    node: Node,
    plan: Plan,
    output: Output,
    reply: Reply | None,
    *,
    stop_ids: tuple[int, ...],
    template_hash: str,
) -> Call:
    """The record of a call. Without a log-probability for every token it has none: it is not trainable."""
    request = attempt.request
    kept = {name: _storable(value) for name, value in request.other.items()} | {"model": request.model}
    kept.pop("gyre", None)
    if reply is not None:
        memo = Memo(key=node.key.hex(), depth=node.depth, digest=request.digest, reply=reply)
        kept["gyre"] = msgspec.to_builtins(memo)
    logprobs = output.logprobs if output.logprobs is not None and len(output.logprobs) == len(output.ids) else None
    return Call(
        call=attempt.call,
        execution=execution,
        role=attempt.role,
        dialect=request.dialect,
        parent=plan.parent.call if plan.parent is not None else None,
        prefix=plan.prefix,
        prompt=pack_ids(node.prompt),
        inserted=plan.inserted,
        output=pack_ids(node.output),
        logprobs=b"" if logprobs is None else pack_logprobs(logprobs),
        versions=tuple(output.versions),
        finish=output.finish,
        matched_stop=output.matched,
        attempts=tuple(output.attempts),
        sampling=sampling_params(request.sampling, request.sampling.max_tokens, stop_ids),
        tools_hash=digest(msgspec.json.encode(request.conversation.tools)).hex(),
        template_hash=template_hash,
        request=kept,
        started=attempt.started,
        ended=round(time.time(), 3),
    )


def recorded(before: Log) -> Iterator[tuple[Call, Node, Memo]]:
    """The answered calls of a log with their nodes, parents first. Raises `msgspec.ValidationError`."""
    nodes: dict[str, Node] = {}
    for call in before.calls:
        if call.finish not in ("stop", "length") or "gyre" not in call.request:
            continue
        if call.parent is not None and call.parent not in nodes:
            log.error("%s: call %s continues %s, which its log does not hold", call.execution, call.call, call.parent)
            continue
        memo = msgspec.convert(call.request["gyre"], Memo)
        node = nodes[call.call] = Node(
            call=call.call,
            parent=nodes[call.parent] if call.parent is not None else None,
            key=bytes.fromhex(memo.key),
            depth=memo.depth,
            message=_message(memo.reply),
            prompt=unpack_ids(call.prompt),
            output=unpack_ids(call.output),
        )
        yield call, node, memo


def _message(reply: Reply | None) -> Message:
    if reply is None:
        return Message(role="assistant")
    return Message(role="assistant", text=reply.text, reasoning=reply.reasoning, calls=reply.calls)


def _storable(value: Any) -> Any:
    """`value`, or its JSON text where MessagePack cannot hold it (an integer beyond 64 bits)."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, RecursionError):
        return msgspec.json.encode(value).decode()
    return value
