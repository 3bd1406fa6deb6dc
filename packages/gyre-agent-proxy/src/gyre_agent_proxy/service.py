"""The proxy without HTTP: executions, their attempts, and what is recorded of each call.

submit: join an equal request's attempt ─or─ plan the prompt ─▶ generate ─▶ record ─▶ history ─▶ reply
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping

import msgspec

from gyre_agent_proxy.answer import reply_of
from gyre_agent_proxy.attempt import Attempt
from gyre_agent_proxy.budget import fit
from gyre_agent_proxy.constraint import Demand, constrain
from gyre_agent_proxy.conversation import Reply, Request, digest
from gyre_agent_proxy.errors import EngineError, ExecutionEnded, NoEngine, ProxyError, RecordError, TooBusy
from gyre_agent_proxy.executions import Execution, Executions
from gyre_agent_proxy.generate import Engines, Generation
from gyre_agent_proxy.history import Node, Plan
from gyre_agent_proxy.memo import call_of, node_of
from gyre_agent_proxy.output import Output
from gyre_agent_proxy.recorder import Recorder
from gyre_agent_proxy.render import Renderer
from gyre_agent_proxy.roles import Roles, tool_names
from gyre_traj.records import Delivered

log = logging.getLogger(__name__)

_NO_DEMAND = Demand()


class Service:
    """All executions of this proxy."""

    def __init__(self, renderer: Renderer, engines: Engines, recorder: Recorder, roles: Roles) -> None:
        self._renderer = renderer
        self._engines = engines
        self._recorder = recorder
        self._roles = roles
        self._open = 0
        self._stopping = False
        self.metrics = engines.metrics
        self._executions = Executions(renderer, recorder, engines.pool, self.metrics, engines.config.executions)

    def submit(self, name: str, request: Request, headers: Mapping[str, str]) -> Attempt:
        """Return the attempt that answers `request` of execution `name`; an equal request in flight is joined.

        Raises `BadRequest` (nothing was changed), `TooBusy`, `BudgetSpent`, `ExecutionEnded`, `NoEngine`,
        `RecordError`.
        """
        if self._stopping:
            raise NoEngine("the proxy is stopping; ask again when it is back")
        execution = self._executions.open(name)
        if caller := self._roles.caller(headers):
            request = msgspec.structs.replace(request, digest=digest(request.digest, *caller).hex())
        earlier = execution.attempts.get(request.digest)
        if earlier is not None and earlier.joinable:
            self.metrics.add("duplicates")
            log.info("%s: a repeated request joined call %s", name, earlier.call)
            return earlier
        if self._open >= self._engines.config.queue:
            raise TooBusy(f"{self._open} calls are open, the most proxy.queue allows; ask again later")
        plan = execution.history.plan(request.conversation)
        sampling = fit(
            request.sampling,
            prompt=len(plan.prompt),
            context=self._engines.config.context,
            sampled=execution.sampled,
            reserved=execution.reserved,
            budget=self._engines.config.token_budget,
        )
        request = self._constrained(msgspec.structs.replace(request, sampling=sampling), plan)
        role, known = self._roles.role(headers, request.conversation)
        self._count(plan, request, known)
        config = self._engines.config
        created = int(time.time())
        attempt = Attempt(_call_id(), request, role, created, grace=config.disconnect_grace, gather=config.gather)
        attempt.prompt_tokens = len(plan.prompt)
        attempt.thinking = self._renderer.thinking(plan.prompt[-16:].tolist())
        interval = 1 if request.stream else self._engines.config.whole_interval
        attempt.generation = Generation(
            self._engines,
            name,
            plan.prompt,
            request.sampling,
            attempt.progress,
            interval=interval,
            computed=plan.prefix,
        )
        execution.attempts.pop(request.digest, None)
        execution.attempts[request.digest] = attempt
        self._open += 1
        execution.reserved += sampling.max_tokens
        task = asyncio.create_task(self._run(execution, attempt, attempt.generation, plan), name=f"call {attempt.call}")
        execution.tasks.add(task)
        task.add_done_callback(execution.tasks.discard)
        return attempt

    def count(self, name: str, request: Request) -> int:
        """Tokens of the prompt that `submit` would send; changes nothing. Raises as `submit` does."""
        return len(self._executions.history(name).plan(request.conversation).prompt)

    @property
    def context(self) -> int:
        """Prompt + output tokens of one call, 0 where that is not known."""
        return self._engines.config.context

    def delivered(self, name: str, attempt: Attempt, *, ok: bool) -> None:
        """The answer was written to a connection whole, or the connection was lost while it was written."""
        attempt.delivered = attempt.delivered or ok
        execution = self._executions.get(name)
        if ok and execution is not None and execution.attempts.get(attempt.request.digest) is attempt:
            del execution.attempts[attempt.request.digest]
        if not ok:
            self.metrics.add("undelivered")
        if execution is not None:
            try:
                self._recorder.append(name, Delivered(call=attempt.call, ok=ok))
            except RecordError as e:  # nothing can be taken back: the answer has gone out
                self.metrics.add("deliveries_unrecorded")
                log.error("%s: call %s: %s", name, attempt.call, e)

    def failing(self, name: str) -> str:
        """Why the execution's last call failed, empty if it did not or by its own fault."""
        execution = self._executions.get(name)
        return execution.failing if execution is not None else ""

    async def close(self, name: str, deadline: float = 30.0) -> int:
        """End an execution: abort what is still running, complete its log, forget it; returns its number of calls.

        Idempotent. Raises `RecordError`.
        """
        self._executions.end(name)
        if (execution := self._executions.get(name)) is not None:
            await self._stop(execution, deadline)
            if self._executions.get(name) is execution:  # nobody else closed it meanwhile
                self._executions.forget(name)
        return self._recorder.count(name)

    async def stop(self, deadline: float = 15.0) -> None:
        """Take no further call, abort everything and close all logs."""
        self._stopping = True
        await asyncio.gather(*(self._stop(e, deadline) for e in self._executions.values()))
        self._recorder.close_all()

    async def _stop(self, execution: Execution, deadline: float) -> None:
        for attempt in execution.attempts.values():
            if attempt.generation is not None and not attempt.reply.done():
                attempt.generation.abandon()
        await self._engines.pool.notify()
        if execution.tasks:
            _, left = await asyncio.wait(execution.tasks, timeout=deadline)
            for task in left:
                log.error("%s: %s did not end in %g s", execution.name, task.get_name(), deadline)
                task.cancel()
        # An answer on its way out is still to be recorded as delivered.
        leaving = [asyncio.ensure_future(a.unattended.wait()) for a in execution.attempts.values()]
        if leaving:
            _, left_open = await asyncio.wait(leaving, timeout=min(deadline, 5.0))
            for wait in left_open:
                wait.cancel()

    @property
    def stats(self) -> dict[str, object]:
        """What `GET /gyre/stats` shows."""
        pool = self._engines.pool
        return {
            **self.metrics.counts,
            "open_calls": self._open,
            "open_executions": len(self._executions),
            "epoch": pool.epoch,
            "engines": {
                name: {
                    "url": s.route.url,
                    "routed": s.routed,
                    "draining": s.draining,
                    "active": len(s.active),
                    "executions": len(s.executions),
                    "failures": s.failures,
                }
                for name, s in pool.engines.items()
            },
        }

    def _constrained(self, request: Request, plan: Plan) -> Request:
        """The request with the constraint that its answer is sampled under, and with what of it is not followed."""
        if request.demand == _NO_DEMAND:
            return request
        renderer, tools = self._renderer, tool_names(request.conversation.tools)
        opened = renderer.thinking(plan.prompt[-16:].tolist())
        thinks = renderer.vocabulary.id("</think>") is not None
        found = constrain(request.demand, tools, plain=renderer.plain, opened=opened, thinks=thinks)
        self.metrics.add("demands_ignored", len(found.ignored))
        other = request.other | ({"demands_ignored": list(found.ignored)} if found.ignored else {})
        sampling = msgspec.structs.replace(request.sampling, constraint=found.sampling)
        return msgspec.structs.replace(request, sampling=sampling, other=other)

    def _count(self, plan: Plan, request: Request, known: bool) -> None:
        self.metrics.add("unknown_roles", not known)
        self.metrics.add("forks", plan.forked)
        self.metrics.add("roots", plan.parent is None)
        self.metrics.add("spliced_turns", plan.spliced)
        self.metrics.add("foreign_turns", plan.foreign)
        self.metrics.add("restored_turns", plan.restored)
        self.metrics.add("media_omitted", request.omitted)
        self.metrics.add("left_out", request.left_out)
        self.metrics.add("tools_ignored", bool(request.conversation.tools) and not self._renderer.shows_tools)

    async def _run(self, execution: Execution, attempt: Attempt, generation: Generation, plan: Plan) -> None:
        output = generation.output
        try:
            await generation.run()
            if output.finish == "abort":
                self.metrics.add("calls_aborted")
                self._record(execution, attempt, plan, output, None)
                self._recorder.append(execution.name, Delivered(call=attempt.call, ok=False))
                attempt.settle(
                    ExecutionEnded(f"execution {execution.name!r} was closed while this call was answered")
                    if self._executions.ended(execution.name)
                    else NoEngine("the call was aborted: the proxy is stopping, or nobody waited for its answer")
                )
                return
            reply = reply_of(attempt, plan, output, self._renderer, execution.history)
            node = self._record(execution, attempt, plan, output, reply)
            execution.history.insert(node)
            execution.failing = ""
            attempt.settle(reply)
        except ProxyError as e:
            await self._fail(execution, attempt, plan, output, e)
        except Exception as e:
            log.exception("%s: call %s failed", execution.name, attempt.call)
            await self._fail(
                execution, attempt, plan, output, EngineError(f"the proxy failed: {type(e).__name__}: {e}")
            )
        finally:
            self._open -= 1
            execution.reserved -= attempt.request.sampling.max_tokens
            execution.trim()
            attempt.settle(EngineError("the call was cancelled"))

    async def _fail(
        self, execution: Execution, attempt: Attempt, plan: Plan, output: Output, error: ProxyError
    ) -> None:
        output.finish = "error"
        if error.status >= 500:
            execution.failing = str(error)
        if output.ids and not attempt.recorded:
            try:
                self._record(execution, attempt, plan, output, None)
            except ProxyError as e:
                log.error("%s", e)
        if execution.attempts.get(attempt.request.digest) is attempt:
            del execution.attempts[attempt.request.digest]
        attempt.settle(error)

    def _record(self, execution: Execution, attempt: Attempt, plan: Plan, output: Output, reply: Reply | None) -> Node:
        """Write the call to its log, where it must be once at most, and return its node. Raises `RecordError`."""
        node = node_of(attempt.call, plan, output, reply)
        call = call_of(
            execution.name,
            attempt,
            node,
            plan,
            output,
            reply,
            stop_ids=self._renderer.stop_ids,
            template_hash=self._renderer.hash,
        )
        self._recorder.append(execution.name, call)
        attempt.recorded = True
        execution.sampled += len(output.ids)
        if reply is not None:
            worked = {a.engine for a in output.attempts if a.tokens or not a.end.startswith("error")}
            self.metrics.add("calls")
            self.metrics.add("calls_moved", len(worked) > 1)
            self.metrics.add("calls_untrainable", not call.logprobs)
        self.metrics.add("prompt_tokens", len(plan.prompt))
        self.metrics.add("completion_tokens", len(output.ids))
        return node


def _call_id() -> str:
    return secrets.token_hex(12)
