"""The runner process against a scripted scheduler, feed and proxy on the real wires: bursts, fates, stops, restarts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gyre_agent_proxy.keys import execution_of
from gyre_agent_proxy.runner import dispatch, service
from gyre_agent_proxy.runner.errors import HarnessError, RunnerError
from gyre_agent_proxy.runner.ledger import Ledger, Row, State
from gyre_agent_proxy.runner.peers import PeerError, Peers
from gyre_agent_proxy.runner.service import serve
from gyre_sched import protocol as sched
from gyre_traj import intake
from gyre_traj.intake import Ending
from gyre_transport.bus import Server
from gyre_transport.process import Child
from gyre_transport.run import BusConfig, Context

HARNESS = """
import os, pathlib, time, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b"{}", {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
urllib.request.urlopen(request, timeout=60).read()
index = os.environ["GYRE_EXECUTION"][-1]
if index == "1":
    raise SystemExit(1)  # nothing made: nothing to score
pathlib.Path("answer.txt").write_text("broken" if index == "2" else "0.5")
"""
VERIFY = """
import os, pathlib
answer = pathlib.Path("answer.txt").read_text()
pathlib.Path(os.environ["LOGS_DIR"], "verifier", "reward.txt").write_text(answer)
"""


class World:
    """Everything a runner talks to. The scheduler first says NotYet, and grants a burst when all before was submitted;
    the feed decides a group's fates when it is complete."""

    def __init__(self, folder: Path, capacity: int = 2) -> None:
        self.folder = folder
        self.capacity = capacity
        self.asked: Counter[int] = Counter()
        self.dispatched = 0
        self.started: list[str] = []
        self.terminated: list[str] = []
        self.submitted: dict[str, intake.Submit] = {}
        self.fates: list[intake.Fate] = []
        self.calls: Counter[str] = Counter()
        self.closed: list[str] = []
        self.alive = self.most_alive = 0
        self.decides = True
        self.replaced: dict[str, str] = {}
        self.failing = ""  # what the proxy says of every execution's last call
        self.order: tuple[int, ...] = ()  # of a burst's groups
        self.declines = ""  # why no execution is replaced
        self.refuses = ""  # an execution whose end the scheduler does not take

        self.early = 0  # times a burst was asked for too early
        self.ahead = False  # a burst is granted as soon as all before were started

    def context(self) -> Context:
        return Context(self.folder / "config.toml")

    def rows(self) -> dict[str, Row]:
        ledger = Ledger(self.folder / "run" / "ledger.sqlite")
        rows = {row.id: row for row in ledger.rows()}
        ledger.close()
        return rows

    async def on_scheduler(self, request: Any) -> Any:
        match request:
            case sched.OpenBurst(burst=burst, executions=executions, tasks=tasks):
                assert len(tasks) * self.context().batch.group_size == executions
                self.asked[burst] += 1
                done = len(self.started) if self.ahead else len(self.submitted)
                on_their_way = self.capacity if self.ahead else 0
                self.early += done + on_their_way < self.dispatched
                if self.asked[burst] == 1 or done < self.dispatched:
                    return sched.NotYet(reason="cells are training", retry=0.01)
                self.dispatched += executions
                return sched.Granted(burst=burst, capacity=self.capacity, order=self.order)
            case sched.Started(execution=execution, task=task):
                assert task in ("one", "two")
                self.started.append(execution)
                self.alive += 1
                self.most_alive = max(self.most_alive, self.alive)
            case sched.Replace() if self.declines:
                return sched.Declined(reason=self.declines)
            case sched.Replace(execution=execution, by=by):
                if by not in self.replaced.values():
                    self.dispatched += 1
                self.replaced[execution] = by
                if execution not in self.terminated:
                    self.terminated.append(execution)
                    self.alive -= 1
            case sched.Terminated(execution=self.refuses):
                raise ValueError("none of the 0 dispatched")
            case sched.Terminated(execution=execution):
                self.terminated.append(execution)
                self.alive -= 1
            case _:
                raise TypeError(f"a runner does not send {request!r}")
        return sched.Ack()

    async def on_intake(self, request: intake.Request) -> intake.Reply:
        if isinstance(request, intake.Fates):
            return intake.FateList(fates=tuple(self.fates[request.since :]), total=len(self.fates))
        duplicate = request.execution in self.submitted
        self.submitted.setdefault(request.execution, request)
        group = [s for s in self.submitted.values() if s.group == request.group and not s.replaced_by]
        if request.replaced_by and not duplicate:
            self.fates.append(intake.Fate(execution=request.execution, reason="replaced"))
        if self.decides and not duplicate and len(group) == request.group_size:
            for s in group:
                excluded = s.outcome.ending in (Ending.EVALUATOR_FAILED, Ending.ABORTED)
                fate = intake.Fate(execution=s.execution, reason=s.outcome.ending.value)
                self.fates.append(fate if excluded else intake.Fate(execution=s.execution, step=s.burst + 1))
        return intake.Accepted(execution=request.execution, duplicate=duplicate)

    async def on_call(self, request: web.Request) -> web.Response:
        self.calls[self._owner(request)] += 1
        return web.json_response({"choices": []})

    async def on_close(self, request: web.Request) -> web.Response:
        execution = request.match_info["execution"]
        assert self._owner(request) == execution
        self.closed.append(execution)
        calls = self.calls[execution]
        return web.json_response({"execution": execution, "calls": calls, "failing": self.failing})

    def _owner(self, request: web.Request) -> str:
        secret = (self.folder / "run" / "secret").read_bytes().strip()
        return execution_of(secret, request.headers["Authorization"].removeprefix("Bearer "))


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """await make_world(harness source, **config of [runner]) -> a World whose servers answer."""
    closing: list[Any] = []

    async def make(source: str = HARNESS, *, steps: int = 2, group_size: int = 3, **runner: Any) -> World:
        world = World(tmp_path)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", world.on_call)
        app.router.add_post("/gyre/executions/{execution}/close", world.on_close)
        http = web.AppRunner(app)
        await http.setup()
        site = web.TCPSite(http, "127.0.0.1", 0)
        await site.start()
        closing.append(http.cleanup)
        port = http.addresses[0][1]
        (tmp_path / "agent.py").write_text(source)
        for task in ("one", "two"):
            for name, text in {"task.toml": "", "instruction.md": task, "tests/verify.py": VERIFY}.items():
                path = tmp_path / "tasks" / task / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        options = {
            "harness": ["{python}", "{folder}/agent.py"],
            "evaluator_attempts": 2,
            "refills": 0,
            "sandbox": "none",
            **runner,
        }
        (tmp_path / "config.toml").write_text(
            f'[run]\ndir = "{tmp_path}/run"\nsteps = {steps}\n'
            f"[batch]\ngroups = 1\ngroup_size = {group_size}\nper_burst = 2\n"
            f'[bus]\ndir = "{tmp_path}"\n[proxy]\nport = {port}\n[model]\nname = "policy"\n'
            f'[runner]\nfolder = "{tmp_path}"\n' + "".join(f"{k} = {json.dumps(v)}\n" for k, v in options.items())
        )
        bus = world.context().bus
        for server in (
            Server(bus.address("scheduler"), sched.Request, world.on_scheduler),
            Server(bus.address("feed.intake"), intake.Request, world.on_intake),
        ):
            await server.start()
            closing.append(server.close)
        return world

    yield make
    for close in closing:
        await close()


HOLDS = """
import os, pathlib, time
bursts = pathlib.Path(__file__).with_name("bursts")
bursts.mkdir(exist_ok=True)
mine = os.environ["GYRE_EXECUTION"]
(bursts / mine).touch()
while mine == "b0-g00-e0" and not list(bursts.glob("b2-*")):
    time.sleep(0.05)
pathlib.Path("answer.txt").write_text("0.5")
"""


async def test_continuous_admission_asks_for_the_next_burst_while_the_last_one_goes_on(
    make_world: Callable[..., Any],
) -> None:
    """The first execution ends only after one of the third burst has begun."""
    world = await make_world(HOLDS, steps=6, group_size=2)
    world.ahead = True
    config = world.folder / "config.toml"
    config.write_text(config.read_text() + '[sched]\nadmission = "continuous"\n')
    async with asyncio.timeout(120):
        await serve(world.context())
    assert len(world.submitted) == 12
    assert world.most_alive == world.capacity
    assert not world.early, "nobody waited for a place"


async def test_without_it_a_burst_is_asked_for_when_the_last_one_has_ended(make_world: Callable[..., Any]) -> None:
    world = await make_world(steps=4)
    await serve(world.context())
    assert not world.early


async def test_bursts_to_the_end(make_world: Callable[..., Any]) -> None:
    """Two bursts of 2 groups x 3: one scored, one that made nothing, one whose evaluator fails in every group."""
    world = await make_world(steps=4)
    await serve(world.context())

    executions = [f"b{b}-g{g:02d}-e{e}" for b in range(2) for g in range(2) for e in range(3)]
    assert sorted(world.started) == sorted(world.terminated) == sorted(world.submitted) == executions
    assert sorted(set(world.closed)) == executions
    assert set(world.started[:2]) == set(executions[:2])  # groups in order; two slots start side by side
    assert world.most_alive <= 2  # what was granted
    assert world.asked == {0: 2, 1: 2}
    assert {s.group_size for s in world.submitted.values()} == {3}
    for burst in range(2):
        assert {s.task for s in world.submitted.values() if s.burst == burst} == {"one", "two"}

    endings = {"0": Ending.SCORED, "1": Ending.NOTHING_TO_SCORE, "2": Ending.EVALUATOR_FAILED}
    fates = {"0": State.TRAINED, "1": State.PLACEHOLDER, "2": State.EXCLUDED}
    rows = world.rows()
    for name, submission in world.submitted.items():
        assert submission.outcome.ending is endings[name[-1]]
        assert submission.outcome.score == (0.5 if name[-1] == "0" else None)
        assert submission.log.endswith(f"/run/calls/{name}.gtraj")
        row = rows[name]
        assert row.state is fates[name[-1]]
        assert row.calls == 1
        assert row.trained_step == (None if row.state is State.EXCLUDED else row.burst + 1)

    seen = json.loads((world.folder / "run/metrics/runner.json").read_text())
    assert (seen["dispatched"], seen["terminated"], seen["trained"], seen["excluded"]) == (12, 12, 4, 4)
    assert (seen["placeholders"], seen["calls"], seen["mean_score"]) == (4, 12, 0.5)
    assert (seen["harness_failures"], seen["evaluator_failures"]) == (4, 8)


async def test_groups_start_in_the_order_the_scheduler_gives(make_world: Callable[..., Any]) -> None:
    world = await make_world(steps=2)
    world.order = (1, 0)
    world.capacity = 1
    await serve(world.context())
    assert [name[:6] for name in world.started] == ["b0-g01"] * 3 + ["b0-g00"] * 3


@pytest.mark.parametrize("order", [(1,), (0, 0), (0, 1, 2), (0, 2)])
async def test_an_order_that_leaves_a_group_out_or_has_one_twice_dispatches_nothing(
    make_world: Callable[..., Any], order: tuple[int, ...]
) -> None:
    world = await make_world(steps=2)
    world.order = order
    with pytest.raises(RunnerError, match=re.escape(f"expected each of 0 to 1 once, got {order!r}")):
        await serve(world.context())
    assert not world.rows()


async def test_a_harness_with_a_file_has_a_home_of_its_own_while_it_runs(make_world: Callable[..., Any]) -> None:
    """Its configuration is there, with the execution's key; nothing of it is left, and none is in the workspace."""
    world = await make_world(
        "import os, pathlib\n"
        "home = pathlib.Path(os.environ['HOME'])\n"
        "assert home.name == os.environ['GYRE_EXECUTION'] and not os.listdir('.')\n"
        "key = (home / 'config/key').read_text()\n"
        "assert key == os.environ['OPENAI_API_KEY'] + ' 4000'\n"
        "pathlib.Path('answer.txt').write_text('0.5')\n",
        harness="own.toml",
    )
    (world.folder / "own.toml").write_text(
        'command = ["{python}", "{folder}/agent.py"]\n[files]\n"config/key" = "{key} {context}"\n'
    )
    with (world.folder / "config.toml").open("a") as config:
        config.write("[engine]\ncontext_length = 4000\n")
    await serve(world.context())
    assert {s.outcome.score for s in world.submitted.values()} == {0.5}
    assert list((world.folder / "run" / "homes").iterdir()) == []


async def test_executions_without_a_result_are_replaced_in_their_group(make_world: Callable[..., Any]) -> None:
    """The evaluator fails for e2 and for what replaces it first; the second one is scored."""
    source = HARNESS.replace('index = os.environ["GYRE_EXECUTION"][-1]', 'name = os.environ["GYRE_EXECUTION"]')
    source = source.replace('index == "1"', 'name.endswith("e1")').replace(
        'index == "2"', '"e2" in name and name[-2:] != "r2"'
    )
    world = await make_world(source, refills=2)
    await serve(world.context())

    first, second, third = (f"b0-g00-e2{r}" for r in ("", "-r1", "-r2"))
    assert len(world.submitted) == 10
    assert (world.replaced[first], world.replaced[second], world.submitted[third].replaced_by) == (second, third, "")
    assert sorted(world.terminated) == sorted(world.submitted) == sorted(world.started)
    rows = world.rows()
    assert [(rows[n].state, rows[n].replaces, rows[n].replaced_by) for n in (first, second, third)] == [
        (State.EXCLUDED, "", second),
        (State.EXCLUDED, first, third),
        (State.TRAINED, second, ""),
    ]
    assert {s.task for n, s in world.submitted.items() if n.startswith("b0-g00")} == {world.submitted[third].task}
    seen = json.loads((world.folder / "run/metrics/runner.json").read_text())
    assert (seen["dispatched"], seen["trained"], seen["excluded"], seen["placeholders"]) == (10, 4, 4, 2)
    assert (seen["replaced"], seen["not_replaced"]) == (4, 0)


async def test_a_group_is_complete_although_its_members_hang(make_world: Callable[..., Any]) -> None:
    """A harness that never ends, a verifier that never ends: nothing waits longer than their budgets."""
    source = HARNESS.replace("raise SystemExit(1)", "time.sleep(600)").replace('"broken"', '"hang"')
    world = await make_world(source, steps=2, budget=6.0, evaluator_timeout=6.0, evaluator_attempts=1, refills=1)
    for task in ("one", "two"):
        verifier = world.folder / "tasks" / task / "tests" / "verify.py"
        verifier.write_text(VERIFY + "if answer == 'hang':\n    import time; time.sleep(600)\n")
    async with asyncio.timeout(200):
        await serve(world.context())
    rows = world.rows()
    assert {n: (rows[n].why, rows[n].ending, rows[n].state) for n in rows if n.startswith("b0-g00")} == {
        "b0-g00-e0": ("exit 0", Ending.SCORED, State.TRAINED),
        "b0-g00-e1": ("budget", Ending.NOTHING_TO_SCORE, State.PLACEHOLDER),
        "b0-g00-e2": ("exit 0", Ending.EVALUATOR_FAILED, State.EXCLUDED),
        "b0-g00-e2-r1": ("budget", Ending.NOTHING_TO_SCORE, State.PLACEHOLDER),
    }


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of the scripted client that is `docker` here; see parts/docker.py."""
    state = tmp_path / "docker"
    (state / "pulled").mkdir(parents=True)
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    part = Path(__file__).parent / "parts" / "docker.py"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{part}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_SCRIPTED", str(state))
    return state


IN_CONTAINERS = {"sandbox": "container", "container_image": "example.org/tools:1", "container_user": "image"}


async def test_an_image_that_cannot_be_had_costs_its_executions_alone(
    make_world: Callable[..., Any], docker: Path
) -> None:
    """Each ends without a result, and the run goes on."""
    world = await make_world(steps=2, **IN_CONTAINERS)
    toml = world.folder / "tasks" / "one" / "task.toml"
    toml.write_text('[environment]\ndocker_image = "absent:1"\n')
    await serve(world.context())
    rows = world.rows().values()
    assert {row.ending for row in rows if row.task == "one"} == {Ending.ABORTED}
    assert {row.state for row in rows if row.task == "two"} == {State.TRAINED, State.PLACEHOLDER, State.EXCLUDED}
    assert all("pull access denied for absent:1" in row.detail for row in rows if row.task == "one")
    assert sorted(world.started) == sorted(world.terminated) == sorted(row.id for row in rows)


async def test_a_run_in_the_sandbox_of_this_machine(make_world: Callable[..., Any]) -> None:
    """If it has one; every part of an execution goes the same way."""
    world = await make_world(sandbox="auto")
    await serve(world.context())
    assert Counter(row.state for row in world.rows().values()) == {
        State.TRAINED: 2,
        State.PLACEHOLDER: 2,
        State.EXCLUDED: 2,
    }
    assert set(world.calls.values()) == {1}


@pytest.mark.parametrize(("refills", "declines"), [(1, ""), (2, "no engine is routable")])
async def test_a_group_goes_on_without_a_result_that_cannot_be_had(
    make_world: Callable[..., Any], refills: int, declines: str
) -> None:
    world = await make_world(HARNESS.replace('index == "1"', "False").replace('"2"', '"1"'), steps=2, refills=refills)
    world.declines = declines
    await serve(world.context())
    rows = world.rows()
    assert {row.state for row in rows.values()} == {State.TRAINED, State.EXCLUDED}
    last = rows["b0-g00-e1" if declines else "b0-g00-e1-r1"]
    assert (last.state, last.replaced_by) == (State.EXCLUDED, "")
    assert last.not_replaced == (
        "the scheduler declined: no engine is routable" if declines else "its group has used its 1 refills"
    )
    assert len(rows) == len(world.submitted) == (6 if declines else 8)
    seen = json.loads((world.folder / "run/metrics/runner.json").read_text())
    assert (seen["replaced"], seen["not_replaced"]) == ((0, 2) if declines else (2, 2))


async def test_a_call_that_no_engine_answered_is_not_the_harness_s_failure(make_world: Callable[..., Any]) -> None:
    """Nothing to score because of it is no placeholder; what it left all the same is scored."""
    source = HARNESS.replace('index == "1"', 'os.environ["GYRE_EXECUTION"].endswith("e1")')
    world = await make_world(source.replace('"2"', '"x"'), refills=1)
    world.failing = "no engine within 900 s"
    await serve(world.context())
    rows = world.rows()
    assert rows["b0-g00-e1"].detail == "its last call failed: no engine within 900 s"
    assert (rows["b0-g00-e1"].ending, rows["b0-g00-e1-r1"].ending) == (Ending.ABORTED, Ending.SCORED)


async def test_a_harness_that_can_do_nothing_stops_the_run(make_world: Callable[..., Any]) -> None:
    world = await make_world("import no_such_module", group_size=2)
    with pytest.raises(HarnessError, match="No module named 'no_such_module'"):
        await serve(world.context())
    assert State.STARTED not in {row.state for row in world.rows().values()}
    assert not world.fates


async def test_errors_before_anything_is_dispatched(make_world: Callable[..., Any]) -> None:
    world = await make_world(harness=["no-such-agent"])
    with pytest.raises(HarnessError, match="'no-such-agent' is not on PATH"):
        await serve(world.context())
    (world.folder / "tasks/two/tests/verify.py").unlink()
    with pytest.raises(RunnerError, match="task 'two' has no verifier"):
        await serve(world.context())
    assert not world.asked


async def test_a_run_directory_that_cannot_be_written(make_world: Callable[..., Any]) -> None:
    world = await make_world()
    (world.folder / "run").mkdir()
    (world.folder / "run" / "workspaces").write_text("in the way")
    with pytest.raises(RunnerError, match=r"cannot be written: .*workspaces.*check its space and permissions"):
        await serve(world.context())
    assert {row.state for row in world.rows().values()} == {State.DISPATCHED}


async def test_refusals_and_silence_reach_the_operator(make_world: Callable[..., Any], tmp_path: Path) -> None:
    async def refuse(request: Any) -> Any:
        raise ValueError("this feed is closed")

    bus = BusConfig(dir=str(tmp_path))
    async with (
        Server(bus.address("feed.intake"), intake.Request, refuse),
        Peers(bus, "http://127.0.0.1:9", within=0.2) as peers,
    ):
        with pytest.raises(PeerError, match="the feed refused Fates: ValueError: this feed is closed"):
            await peers.fates(0)
        with pytest.raises(PeerError, match=r"did not close execution 'e' in 0\.2 s"):
            await peers.close_execution("e", "key")


async def test_a_full_feed_is_asked_again(make_world: Callable[..., Any], tmp_path: Path) -> None:
    class FeedError(Exception):
        """As the feed's, whose name is what travels."""

    answers = [FeedError("9 groups wait; submit 'e' again later"), intake.Accepted(execution="e"), FeedError("no")]

    async def full(request: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, FeedError):
            raise answer
        return answer

    bus = BusConfig(dir=str(tmp_path))
    submission = intake.Submit(
        execution="e", task="t", group="g", group_size=1, log="", outcome=intake.Outcome(ending=Ending.ABORTED)
    )
    async with (
        Server(bus.address("feed.intake"), intake.Request, full),
        Peers(bus, "http://127.0.0.1:9", within=30) as peers,
    ):
        await peers.submit(submission)
        with pytest.raises(PeerError, match="the feed refused Submit: FeedError: no"):
            await peers.submit(submission)


async def test_a_burst_that_only_has_to_be_scored_needs_no_grant(make_world: Callable[..., Any]) -> None:
    """The scheduler saw its end and grants it no more; a scheduler that began anew does not even know of it."""
    world = await make_world()
    ledger = Ledger(world.folder / "run" / "ledger.sqlite")
    names = [f"b0-g{g:02d}-e{e}" for g in range(2) for e in range(3)]
    ledger.dispatch([(name, "one", name[:6]) for name in names], 0)
    for name in names:
        ledger.started(name)
        ledger.terminated(name, "exit 0")
        (world.folder / "run" / "workspaces" / name).mkdir(parents=True)
    ledger.judged(names[0], intake.Outcome(ending=Ending.ABORTED))
    ledger.close()
    world.refuses = names[1]
    await serve(world.context())
    assert not world.asked
    assert sorted(world.terminated) == names[:1] + names[2:]
    assert sorted(world.submitted) == names


@pytest.mark.parametrize("told", [False, True])
async def test_a_burst_of_which_only_a_replacement_is_to_run(make_world: Callable[..., Any], told: bool) -> None:
    """The scheduler is asked for the burst again if it counts the replacement; if not, it may have ended the burst."""
    world = await make_world(HARNESS.replace("[-1]", "[8]"), refills=1)
    ledger = Ledger(world.folder / "run" / "ledger.sqlite")
    names = [f"b0-g{g:02d}-e{e}" for g in range(2) for e in range(3)]
    ledger.dispatch([(name, "one", name[:6]) for name in names], 0)
    for name in names:
        ledger.started(name)
        ledger.terminated(name, "exit 0")
        ending = Ending.EVALUATOR_FAILED if name == names[0] else Ending.NOTHING_TO_SCORE
        ledger.judged(name, intake.Outcome(ending=ending))
    by = ledger.refill(names[0], 1).replaced_by
    if told:
        await world.on_scheduler(sched.Replace(execution=names[0], by=by, burst=0))
        outcome = intake.Outcome(ending=Ending.EVALUATOR_FAILED)
        await world.on_intake(
            intake.Submit(
                execution=names[0],
                task="one",
                group=names[0][:6],
                group_size=3,
                log="",
                outcome=outcome,
                replaced_by=by,
            )
        )
        ledger.submitted(names[0])
    world.dispatched = 0
    ledger.close()
    await serve(world.context())
    assert dict(world.asked) == ({0: 2} if told else {})
    assert (world.started, world.replaced) == ([by], {names[0]: by})
    assert sorted(world.terminated) == sorted(world.submitted) == sorted([*names, by])
    rows = world.rows()
    assert (rows[names[0]].state, rows[by].state) == (State.EXCLUDED, State.TRAINED)


async def test_fates_that_never_come(make_world: Callable[..., Any]) -> None:
    world = await make_world(fates_within=0.1)
    world.decides = False
    with pytest.raises(RunnerError, match="6 executions have no fate"):
        await serve(world.context())
    assert {row.state for row in world.rows().values()} == {State.SUBMITTED}


PLAIN = """
import pathlib
pathlib.Path("answer.txt").write_text("0.5")
"""
WAITING = """
import os, pathlib, time
pathlib.Path("pid").write_text(str(os.getpid()))
(pathlib.Path(os.environ["HOME"]).parent.parent / (os.environ["GYRE_EXECUTION"] + ".up")).touch()
time.sleep(600)
"""
START = "import asyncio, pathlib, sys\nfrom gyre_agent_proxy.runner.service import serve\n" + (
    "from gyre_transport.run import Context\nasyncio.run(serve(Context(pathlib.Path(sys.argv[1]))))\n"
)


async def started(world: World, source: str, files: list[str]) -> Child:
    """A runner process of its own whose harnesses have made `files` in the run directory."""
    (world.folder / "agent.py").write_text(source)
    log = world.folder / "runner.log"
    child = await Child.start("runner", [sys.executable, "-c", START, str(world.folder / "config.toml")], log=log)
    while not all((world.folder / "run" / name).exists() for name in files):
        assert child.returncode is None, child.tail()
        await asyncio.sleep(0.02)
    return child


def pids(world: World, names: list[str]) -> list[int]:
    return [int((world.folder / "run/workspaces" / name / "pid").read_text()) for name in names]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


UP = ["b0-g00-e0", "b0-g00-e1"]


async def test_sigterm_ends_harnesses_and_a_restart_goes_on(make_world: Callable[..., Any]) -> None:
    """Stopped: what ran is aborted, what had not started is dispatched still. The next runner finishes all of it, and
    what was stopped is dispatched anew."""
    world = await make_world(refills=1)
    child = await started(world, WAITING, [f"{name}.up" for name in UP])
    running = pids(world, UP)
    assert await child.stop() == 0
    assert all(gone(pid) for pid in running)
    rows = world.rows()
    assert {(rows[n].state, rows[n].ending) for n in UP} == {(State.JUDGED, Ending.ABORTED)}
    assert {row.state for name, row in rows.items() if name not in UP} == {State.DISPATCHED}
    assert not world.submitted
    assert not world.terminated

    (world.folder / "agent.py").write_text(HARNESS.replace('"2"', '"x"').replace("-1]", "8]"))
    world.dispatched = 0
    await serve(world.context())
    rows = world.rows()
    assert {rows[n].state for n in UP} == {State.EXCLUDED}
    assert {(rows[n].replaced_by, rows[f"{n}-r1"].ending is None) for n in UP} == {(f"{n}-r1", False) for n in UP}
    assert sorted(world.terminated) == sorted(set(world.closed)) == sorted(rows), "the water level reaches 0"
    assert {row.state for row in rows.values()} == {State.TRAINED, State.PLACEHOLDER, State.EXCLUDED}
    assert len(world.submitted) == 8


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_a_run_that_ends_again_and_again_skips_no_task_and_draws_none_twice(
    make_world: Callable[..., Any], how: signal.Signals
) -> None:
    """Wherever in its bursts it ends: with the restarts it dispatches what it would have dispatched without."""
    world = await make_world(PLAIN, steps=6, group_size=2)
    world.capacity = 1
    for count in (1, 6, 7):  # executions started: within the first burst, and twice within the second
        child = await started(world, PLAIN, [])
        while len(world.started) < count:
            assert child.returncode is None, child.tail()
            await asyncio.sleep(0.01)
        os.kill(child.pid, how)
        await child.stop()
        world.dispatched = 0  # a burst may be granted a second time
    await serve(world.context())
    context = world.context()
    names = dispatch.order(["one", "two"], context.run.seed)
    planned = [p for burst in range(3) for p in dispatch.burst(burst, context.batch, names)]
    assert {name: row.task for name, row in world.rows().items()} == {p.execution: p.task for p in planned}
    assert sorted(world.submitted) == sorted(p.execution for p in planned)
    assert set(world.started) == set(world.terminated) == set(world.submitted), "each was started, and ended"


async def test_a_killed_runner_takes_its_harnesses_along_and_their_work_is_scored(
    make_world: Callable[..., Any],
) -> None:
    world = await make_world()
    source = WAITING.replace("(pathlib", 'pathlib.Path("answer.txt").write_text("0.25")\n(pathlib', 1)
    child = await started(world, source, [f"{name}.up" for name in UP])
    running = pids(world, UP)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.stop() == -signal.SIGKILL
    while not all(gone(pid) for pid in running):
        await asyncio.sleep(0.02)
    assert {world.rows()[n].state for n in UP} == {State.STARTED}

    (world.folder / "agent.py").write_text(HARNESS)
    world.dispatched = 0
    await serve(world.context())
    rows = world.rows()
    assert {(rows[n].why, rows[n].ending, rows[n].score, rows[n].state) for n in UP} == {
        ("lost", Ending.SCORED, 0.25, State.TRAINED)
    }
    assert len(world.submitted) == 6


async def test_a_killed_runner_takes_its_containers_along(make_world: Callable[..., Any], docker: Path) -> None:
    world = await make_world(**IN_CONTAINERS)
    source = WAITING.replace('pathlib.Path(os.environ["HOME"])', f'pathlib.Path("{world.folder}/run/workspaces/x")')
    child = await started(world, source, [f"{name}.up" for name in UP])
    running = pids(world, UP)
    assert len(list((docker / "containers").glob("*.json"))) == 2
    os.kill(child.pid, signal.SIGKILL)
    assert await child.stop() == -signal.SIGKILL
    while list((docker / "containers").glob("*.json")) or not all(gone(pid) for pid in running):
        await asyncio.sleep(0.02)
    world.dispatched = 0
    (world.folder / "agent.py").write_text(HARNESS)
    await serve(world.context())
    rows = world.rows()
    assert {rows[n].why for n in UP} == {"lost"}
    assert Counter(row.ending for name, row in rows.items() if name not in UP) == {
        Ending.SCORED: 1,
        Ending.NOTHING_TO_SCORE: 1,
        Ending.EVALUATOR_FAILED: 2,
    }
    assert list((docker / "containers").iterdir()) == []


async def test_what_a_dead_runner_left_is_ended_by_the_next_one(
    make_world: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guards were killed, too, so daemons of the harnesses go on; and a home was left behind."""
    world = await make_world()
    daemon = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import pathlib, time
        pathlib.Path("daemon.tmp").write_text(str(os.getpid()))
        os.rename("daemon.tmp", "daemon")
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists("daemon"):
    pass
"""
    child = await started(world, daemon + WAITING, [f"{name}.up" for name in UP])
    run = world.folder / "run"
    (run / "homes" / UP[0]).mkdir(parents=True)
    monkeypatch.setattr(service, "_ALONE", 0.0)
    with pytest.raises(RunnerError, match="another runner is at work"):
        await serve(world.context())
    daemons = [int((run / "workspaces" / name / "daemon").read_text()) for name in UP]
    for pid in (child.pid, *(parent(harness) for harness in pids(world, UP))):
        os.kill(pid, signal.SIGKILL)
    await child.stop()
    assert not any(gone(pid) for pid in daemons)

    (world.folder / "agent.py").write_text(HARNESS)
    world.dispatched = 0
    await serve(world.context())
    while not all(gone(pid) for pid in daemons):  # init has to take note
        await asyncio.sleep(0.02)
    assert re.search(rf"that an earlier runner of this run left: \d of {UP[0]}, \d of {UP[1]}", caplog.text)
    assert not any((run / "homes").iterdir())
    assert len(world.submitted) == 6


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("keep", "endings"), [("all", "012"), ("failed", "12"), ("none", "")])
async def test_workspaces_that_are_kept(make_world: Callable[..., Any], keep: str, endings: str) -> None:
    world = await make_world(keep_workspaces=keep)
    await serve(world.context())
    left = {path.name for path in (world.folder / "run/workspaces").iterdir()}
    names = {f"b0-g{g:02d}-e{e}" for g in range(2) for e in endings}
    assert left == names | {f"{name}.owner" for name in names}
    assert list((world.folder / "run" / "homes").iterdir()) == list((world.folder / "run" / "scoring").iterdir()) == []
