"""The executions a proxy holds: each with its history, its attempts and its log.

unknown ─ its first request ─▶ held ◀─ its next request: rebuilt from its log ─┐
                                │ silent longest, when there are too many ─▶ set aside (as after a restart)
                                └ closed ─▶ ended: its log takes no further call
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping

from gyre_agent_proxy.attempt import Attempt
from gyre_agent_proxy.conversation import Conversation, Request, Sampling
from gyre_agent_proxy.engines import Pool
from gyre_agent_proxy.errors import ExecutionEnded, RecordError
from gyre_agent_proxy.history import History
from gyre_agent_proxy.memo import recorded
from gyre_agent_proxy.metrics import Metrics
from gyre_agent_proxy.recorder import Recorder
from gyre_agent_proxy.render import Renderer
from gyre_traj.log import Log
from gyre_traj.records import unpack_ids

log = logging.getLogger(__name__)

_NOTHING = Conversation(messages=())
_SAMPLING = Sampling(max_tokens=1)
_KEPT = 64  # undelivered answers kept for a repeated request, per execution


class Execution:
    """History and attempts of one execution."""

    def __init__(self, name: str, history: History) -> None:
        self.name = name
        self.history = history
        self.sampled = 0  # tokens of recorded calls
        self.reserved = 0  # tokens that open calls may sample
        self.attempts: dict[str, Attempt] = {}  # by request digest: running, or answered and not delivered
        self.tasks: set[asyncio.Task[None]] = set()
        self.failing = ""  # why the last call failed, if it did and not by its own fault

    @property
    def busy(self) -> bool:
        """Whether there is more to it than its log tells: an open call, an answer on its way, a failure."""
        leaving = any(not a.unattended.is_set() for a in self.attempts.values())
        return bool(self.tasks or self.failing or leaving)

    def trim(self) -> None:
        """Bound what is kept for repeated requests: answers only, and of those the last."""
        done = [(d, a.joinable) for d, a in self.attempts.items() if a.reply.done()]
        answered = [d for d, joinable in done if joinable]
        for key in [d for d, joinable in done if not joinable] + answered[: max(0, len(answered) - _KEPT)]:
            del self.attempts[key]

    def rebuild(self, before: Log) -> None:
        """Take over what a log says of this execution. Raises `msgspec.ValidationError`."""
        self.sampled = sum(len(unpack_ids(call.output)) for call in before.calls)
        for call, node, memo in recorded(before):
            self.history.insert(node)
            if not before.delivered.get(call.call):
                request = Request(
                    conversation=_NOTHING, sampling=_SAMPLING, dialect=call.dialect, model="", digest=memo.digest
                )
                attempt = Attempt(call.call, request, call.role, memo.reply.created)
                attempt.settle(memo.reply)
                self.attempts[memo.digest] = attempt
        self.trim()


class Executions(Mapping[str, Execution]):
    """Those that are held, in the order of their last request."""

    def __init__(self, renderer: Renderer, recorder: Recorder, pool: Pool, metrics: Metrics, limit: int) -> None:
        """limit: how many are held; more only where all are busy."""
        self._renderer = renderer
        self._recorder = recorder
        self._pool = pool
        self._metrics = metrics
        self._limit = limit
        self._held: dict[str, Execution] = {}
        self._ended: set[str] = set()

    def __getitem__(self, name: str) -> Execution:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def open(self, name: str) -> Execution:
        """The execution `name`, whether new, held or recorded. Raises `ExecutionEnded`, `RecordError`."""
        if self.ended(name):
            raise ExecutionEnded(f"execution {name!r} was closed; its log is complete and takes no further call")
        if (execution := self._held.pop(name, None)) is None:
            execution = self._opened(name)
        self._held[name] = execution
        self._set_aside()
        return execution

    def history(self, name: str) -> History:
        """The history of `name`, an empty one where it has none; a new execution is not begun. Raises as `open`."""
        known = name in self._held or self.ended(name) or self._recorder.path(name).is_file()
        return self.open(name).history if known else History(self._renderer)

    def ended(self, name: str) -> bool:
        """Whether `end` was told of `name`."""
        return name in self._ended

    def end(self, name: str) -> None:
        """Take no further request of `name`."""
        self._ended.add(name)

    def forget(self, name: str) -> None:
        """Let go of `name` and close its log. Raises `RecordError` if that cannot be forced to disk."""
        del self._held[name]
        self._pool.forget(name)
        self._recorder.close(name)

    def _opened(self, name: str) -> Execution:
        before = self._recorder.open(name)
        execution = Execution(name, History(self._renderer))
        if before is None:
            self._metrics.add("executions")
            return execution
        try:
            execution.rebuild(before)
        except Exception as e:
            self._recorder.close(name)
            raise RecordError(f"{name!r} cannot be continued from its log: {type(e).__name__}: {e}") from e
        log.info("%s: continued from its log, %d calls", name, execution.history.calls)
        return execution

    def _set_aside(self) -> None:
        """Forget the ones that are silent longest, beyond the limit: their logs have all there is."""
        over = len(self._held) - self._limit
        if over <= 0:
            return
        *earlier, _ = self._held.values()
        for execution in [e for e in earlier if not e.busy][:over]:
            self._metrics.add("executions_set_aside")
            try:
                self.forget(execution.name)
            except RecordError as e:
                log.error("%s: %s", execution.name, e)
