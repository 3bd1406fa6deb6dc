"""Group refill: what is replaced, how often, and that a runner killed anywhere neither loses nor doubles one."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gyre_agent_proxy.keys import make_key
from gyre_agent_proxy.runner import journey as journeys
from gyre_agent_proxy.runner import refill
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import LedgerError
from gyre_agent_proxy.runner.execution import End, Harness
from gyre_agent_proxy.runner.journey import Journey
from gyre_agent_proxy.runner.ledger import Ledger, State
from gyre_agent_proxy.runner.peers import Closed, Peers
from gyre_agent_proxy.runner.tasks import Task
from gyre_train.feed.buffer import Buffer
from gyre_traj.intake import Ending, Fate, Outcome, Submit
from gyre_transport.errors import ProcessError
from gyre_transport.run import BusConfig, RunDir


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (Ending.ABORTED, True),
        (Ending.EVALUATOR_FAILED, True),
        (Ending.SCORED, False),
        (Ending.NOTHING_TO_SCORE, False),
        (None, False),
    ],
)
def test_what_has_no_result_is_replaceable(ending: Ending | None, expected: bool) -> None:
    assert refill.replaceable(ending) is expected


def test_names_say_what_is_replaced() -> None:
    names = ["b0-g00-e3"]
    for _ in range(10):
        names.append(refill.successor(names[-1]))
    assert names[1:4] == ["b0-g00-e3-r1", "b0-g00-e3-r2", "b0-g00-e3-r3"]
    assert names[-1] == "b0-g00-e3-r10"
    assert refill.successor("e-r0") == "e-r0-r1"


@pytest.mark.parametrize(
    ("why", "used", "limit", "expected"),
    [
        ("exit 1", 0, 2, ""),
        ("exit 1", 1, 2, ""),
        ("exit 1", 2, 2, "its group has used its 2 refills"),
        ("exit 1", 0, 0, "runner.refills is 0"),
        ("stopped", 2, 2, ""),
        ("stopped", 0, 0, "runner.refills is 0"),
    ],
)
def test_the_limit(why: str, used: int, limit: int, expected: str) -> None:
    assert refill.obstacle(why, used, limit) == expected


GROUP = [f"b0-g00-e{i}" for i in range(3)]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "ledger.sqlite")
    made.dispatch([(name, "t", "b0-g00") for name in GROUP], 0)
    yield made
    made.close()


def end(ledger: Ledger, name: str, ending: Ending = Ending.ABORTED, why: str = "exit 1") -> None:
    ledger.started(name)
    ledger.terminated(name, why)
    ledger.judged(name, Outcome(ending=ending, score=1.0 if ending is Ending.SCORED else None))


def test_a_replacement_is_entered_with_what_it_replaces(ledger: Ledger) -> None:
    end(ledger, GROUP[0])
    row = ledger.refill(GROUP[0], 1)
    by = ledger.row(row.replaced_by)
    assert (by.id, by.task, by.grp, by.burst, by.state, by.replaces) == (
        "b0-g00-e0-r1", "t", "b0-g00", 0, State.DISPATCHED, GROUP[0],
    )  # fmt: skip
    assert ledger.refill(GROUP[0], 1) == row, "decided once"
    end(ledger, GROUP[1])
    assert ledger.refill(GROUP[1], 1).not_replaced == "its group has used its 1 refills"
    assert ledger.refill(GROUP[1], 9).not_replaced, "decided once"
    assert ledger.refills() == (1, 1)


def test_what_an_operator_stopped_takes_no_refill_from_its_group(ledger: Ledger) -> None:
    for name, why in zip(GROUP, ("stopped", "stopped", "exit 1"), strict=True):
        end(ledger, name, why=why)
        assert ledger.refill(name, 1).replaced_by == f"{name}-r1"


@pytest.mark.parametrize("ending", [Ending.SCORED, Ending.NOTHING_TO_SCORE])
def test_what_has_a_result_cannot_be_replaced(ledger: Ledger, ending: Ending) -> None:
    end(ledger, GROUP[0], ending)
    with pytest.raises(LedgerError, match="is judged and cannot be replaced"):
        ledger.refill(GROUP[0], 2)
    with pytest.raises(LedgerError, match="is dispatched and cannot be replaced"):
        ledger.refill(GROUP[1], 2)
    assert len(ledger.rows()) == 3


def test_a_declined_replacement_never_was(ledger: Ledger) -> None:
    end(ledger, GROUP[0])
    ledger.refill(GROUP[0], 2)
    ledger.withdraw(GROUP[0], "no engine")
    assert (ledger.row(GROUP[0]).replaced_by, ledger.row(GROUP[0]).not_replaced) == ("", "no engine")
    assert [row.id for row in ledger.rows()] == GROUP
    end(ledger, GROUP[1])
    by = ledger.refill(GROUP[1], 1).replaced_by
    assert by, "nor did it take a refill"
    ledger.started(by)
    with pytest.raises(LedgerError, match="is not dispatched, or no more"):
        ledger.withdraw(GROUP[1], "too late")
    assert ledger.row(GROUP[1]).replaced_by == by


def test_a_ledger_of_an_earlier_version(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "old.sqlite")
    old.execute(
        "CREATE TABLE executions (id TEXT PRIMARY KEY, task TEXT NOT NULL, grp TEXT NOT NULL, burst INTEGER NOT NULL, "
        "state TEXT NOT NULL, dispatched REAL NOT NULL, started REAL, terminated REAL, why TEXT NOT NULL DEFAULT '', "
        "ending TEXT, score REAL, detail TEXT NOT NULL DEFAULT '', calls INTEGER, trained_step INTEGER, "
        "reason TEXT NOT NULL DEFAULT '') STRICT"
    )
    old.execute(
        "INSERT INTO executions (id, task, grp, burst, state, dispatched) VALUES ('e', 't', 'g', 0, 'dispatched', 1)"
    )
    old.commit()
    old.close()
    ledger = Ledger(tmp_path / "old.sqlite")
    end(ledger, "e")
    assert ledger.refill("e", 1).replaced_by == "e-r1"
    ledger.close()


async def test_the_proxy_says_whether_the_last_call_failed(bench: Any, http: Any) -> None:
    engine = await bench.engine()
    secret = b"0123456789abcdef" * 4
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}

    async def call(execution: str) -> int:
        headers = {"Authorization": f"Bearer {make_key(secret, execution)}"}
        async with http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as response:
            return int(response.status)

    async with bench.proxy(secret, attempts=1) as proxy, Peers(BusConfig(dir="unused"), proxy.url) as peers:
        engine.report = (0, {"message": "out of memory", "type": "InternalServerError", "code": 500})
        assert [await call("broken"), await call("healed")] == [502, 502]
        engine.report = None
        assert await call("healed") == 200
        engine.refuse = "too long"
        assert await call("healed") == 400
        broken = await peers.close_execution("broken", make_key(secret, "broken"))
        healed = await peers.close_execution("healed", make_key(secret, "healed"))
    assert (broken.calls, healed) == (0, Closed(calls=1))
    assert "out of memory" in broken.failing


# --- a runner that is killed between any two steps ------------------------------------------------------------------


class Killed(BaseException):
    """Nothing of the runner runs any more."""


class Clock:
    """Counts what is written or told, and kills before or after it."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.now = 0

    def tick(self) -> None:
        self.now += 1
        if self.now == self.at:
            raise Killed


class Outside:
    """Scheduler and feed, which the runner's death leaves alone. The feed is the real one's buffer."""

    def __init__(self) -> None:
        self.dispatched = set(GROUP)
        self.ended: set[str] = set()
        self.buffer = Buffer()
        self.declines = ""

    def replace(self, execution: str, by: str, burst: int) -> str:
        assert execution in self.dispatched
        if self.declines and by not in self.dispatched:
            return self.declines
        self.dispatched.add(by)
        self.ended.add(execution)
        return ""

    def started(self, execution: str, task: str) -> None:
        assert task
        assert execution in self.dispatched
        assert execution not in self.ended

    def terminated(self, execution: str, *, again: bool) -> None:
        assert execution in self.dispatched
        self.ended.add(execution)

    def submit(self, submission: Submit) -> None:
        self.buffer.submit(submission, 0.0)

    def close_execution(self, execution: str, key: str) -> Closed:
        return Closed(calls=1)


class Stepped:
    """`what`, with a tick of the clock before and after each of the named methods; asynchronous ones if so."""

    def __init__(self, what: Any, clock: Clock, names: tuple[str, ...], *, awaited: bool = False) -> None:
        self._what, self._clock, self._names, self._awaited = what, clock, names, awaited

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._what, name)
        if name not in self._names:
            return real

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self._clock.tick()
            result = real(*args, **kwargs)
            self._clock.tick()
            return result

        async def told(*args: Any, **kwargs: Any) -> Any:
            return stepped(*args, **kwargs)

        return told if self._awaited else stepped


WRITES = ("started", "terminated", "judged", "refill", "withdraw", "submitted")
TELLS = ("replace", "started", "terminated", "submit", "close_execution")


async def life(tmp_path: Path, outside: Outside, at: int | None) -> int:
    """A runner that takes the group to its end, or is killed at step `at`; returns the steps it took."""
    clock = Clock(at)
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    ledger.dispatch([(name, "t", "b0-g00") for name in GROUP], 0)

    async def score(task: Task, execution: str, workspace: Path, sandbox: Any) -> Outcome:
        if execution in (GROUP[1], f"{GROUP[1]}-r1"):
            return Outcome(ending=Ending.EVALUATOR_FAILED, detail="no database")
        if execution == GROUP[0]:
            return Outcome(ending=Ending.NOTHING_TO_SCORE)
        return Outcome(ending=Ending.SCORED, score=0.5)

    task = Task(name="t", folder=tmp_path / "t", instruction="do", verifier="verify.py")
    journey = Journey(
        RunnerConfig(refills=2),
        RunDir(tmp_path / "run"),
        len(GROUP),
        {"t": task},
        Harness(command=("x",), env={}, folder="", model="", base_url="", instructions=tmp_path, owner="o"),
        Stepped(ledger, clock, WRITES),  # type: ignore[arg-type]
        Stepped(outside, clock, TELLS, awaited=True),  # type: ignore[arg-type]
        SimpleNamespace(score=score),  # type: ignore[arg-type]
        b"secret" * 8,
    )
    slots = asyncio.Semaphore(1)
    try:
        for name in GROUP:
            await journey.travel(name, slots)
    except Killed:
        pass
    finally:
        ledger.close()
    return clock.now


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Harnesses that end at once; the machine cannot start the first one."""

    async def start(harness: Any, task: Task, execution: str, *rest: Any) -> str:
        if execution == GROUP[0]:
            raise ProcessError("no file handle left")
        return execution

    async def finish(child: Any, budget: float) -> End:
        return End(why="exit 0", code=0, seconds=0.0)

    monkeypatch.setattr(journeys, "start", start)
    monkeypatch.setattr(journeys, "finish", finish)


@pytest.mark.parametrize("declines", ["", "no engine is routable"])
@pytest.mark.usefixtures("scripted")
async def test_a_runner_killed_between_any_two_steps_neither_loses_nor_doubles_a_replacement(
    tmp_path: Path, declines: str
) -> None:
    """e0 cannot be started, e1 has no score twice: with 2 refills e1-r1 is not replaced any more."""
    expected = {*GROUP} if declines else {*GROUP, f"{GROUP[0]}-r1", f"{GROUP[1]}-r1"}
    at, steps = 0, None
    while steps is None or at < steps:
        at += 1
        outside, folder = Outside(), tmp_path / f"{at}"
        outside.declines = declines
        took = await life(folder, outside, at)
        steps = took if took < at else None
        await life(folder, outside, None)

        ledger = Ledger(folder / "run" / "ledger.sqlite")
        rows = {row.id: row for row in ledger.rows()}
        assert set(rows) == outside.dispatched == outside.ended == expected
        assert {row.state for row in rows.values()} == {State.SUBMITTED}
        (group,) = outside.buffer.complete
        assert [m.execution for m in group.members if m.outcome.ending is Ending.SCORED] == [
            *(() if declines else (f"{GROUP[0]}-r1",)),
            GROUP[2],
        ]
        assert len(group.members) + outside.buffer.excluded == len(rows)
        assert all(isinstance(fate, Fate) for fate in outside.buffer.fates(0).fates)
        ledger.close()
    assert at > 40
