"""What a call's sampled output answers: text, reasoning and tool calls with ids that are the execution's alone."""

from __future__ import annotations

import uuid

from gyre_agent_proxy.attempt import Attempt
from gyre_agent_proxy.conversation import Reply, ToolCall
from gyre_agent_proxy.history import History, Plan
from gyre_agent_proxy.output import Output
from gyre_agent_proxy.parse import reasoning_tokens
from gyre_agent_proxy.render import Renderer


def reply_of(attempt: Attempt, plan: Plan, output: Output, renderer: Renderer, history: History) -> Reply:
    """The answer to `attempt`, whose prompt was planned as `plan`; changes nothing."""
    request = attempt.request
    said = renderer.parse(
        plan.prompt[-16:].tolist() if renderer.plain else plan.prompt.tolist(),
        output.ids,
        request.callable_tools,
        request.sampling.stop,
    )
    ids = said.native_ids
    # Models count their calls from anew; an id that is not unique in the execution would name another turn.
    if not ids or len(set(ids)) < len(ids) or any(map(history.knows, ids)):
        ids = tuple(f"call_{uuid.uuid4().hex[:24]}" for _ in said.calls)
    calls = tuple(ToolCall(id=i, name=n, arguments=a) for i, (n, a) in zip(ids, said.calls, strict=True))
    return Reply(
        call=attempt.call,
        text=said.text,
        reasoning=said.reasoning,
        calls=calls,
        finish="tool_calls" if calls and output.finish == "stop" else output.finish,
        stop=output.matched if isinstance(output.matched, str) else None,
        prompt_tokens=len(plan.prompt),
        completion_tokens=len(output.ids),
        cached_tokens=output.cached,
        reasoning_tokens=reasoning_tokens(output.ids, said.reasoning, renderer.vocabulary),
        created=attempt.created,
    )
