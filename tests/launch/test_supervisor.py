"""Start in stages, fail at the first early end, stop in order; with real processes of a few lines."""

import sys
from pathlib import Path

import pytest

from gyre_launch.errors import RunFailed
from gyre_launch.plan import Planned
from gyre_launch.supervisor import Supervisor
from gyre_sched import protocol as p
from gyre_transport.bus import Server
from gyre_transport.errors import ProcessError
from gyre_transport.run import Context

SERVE = "import signal, sys; from gyre_transport.process import *; follow_parent(); ready(); {then}"
FAILS = "sys.exit(4)"
WAIT = "signal.sigwait({signal.SIGTERM}); print('stopped', flush=True)"


def process(name: str, then: str = WAIT, stage: int = 0) -> Planned:
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); "
    argv = (sys.executable, "-c", SERVE.format(then=then).replace("follow_parent();", block + "follow_parent();"))
    return Planned(name=name, argv=argv, stage=stage, ready_within=30)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "config.toml").write_text(f'[run]\ndir = "{tmp_path}"\n[bus]\ndir = "{tmp_path}"\n')
    return Context(tmp_path / "config.toml")


async def test_the_run_ends_with_the_runner(context: Context) -> None:
    said: list[str] = []
    supervisor = Supervisor(context, [process("proxy"), process("runner", "sys.exit(0)", 1)], said.append)
    await supervisor.start()
    await supervisor.watch()
    await supervisor.stop()
    assert said == ["starting proxy", "starting runner"]
    assert (context.dir.logs / "proxy.log").read_text() == "stopped\n"
    assert all(child.returncode == 0 for child in supervisor.children.values())


@pytest.mark.parametrize(("name", "then"), [("feed", "sys.exit(0)"), ("runner", "print('no tasks'); sys.exit(3)")])
async def test_an_early_end_fails_the_run_and_shows_the_log(context: Context, name: str, then: str) -> None:
    supervisor = Supervisor(context, [process("proxy"), process(name, then)], lambda _: None)
    await supervisor.start()
    with pytest.raises(RunFailed, match=f"{name} ended with exit code"):
        await supervisor.watch()
    await supervisor.stop()


COUNTS = "f = open({path!r}, 'a+'); f.seek(0); n = len(f.read()); f.write('x'); f.close(); "


@pytest.mark.parametrize("name", ["scheduler", "proxy", "cell-1"])
async def test_what_can_go_on_is_started_again(context: Context, tmp_path: Path, name: str) -> None:
    starts = tmp_path / "starts"
    dies = COUNTS.format(path=str(starts)) + f"n or sys.exit(7); {WAIT}"
    loop = f"import time\nwhile len(open({str(starts)!r}).read()) < 2: time.sleep(0.02)"
    ends = f"exec({loop!r}); sys.exit(0)"
    said: list[str] = []
    supervisor = Supervisor(context, [process(name, dies), process("runner", ends, 1)], said.append)
    await supervisor.start()
    await supervisor.watch()
    for child in supervisor.children.values():  # nobody here answers to an ordered stop
        await child.stop()
    assert starts.read_text() == "xx"
    assert [s for s in said if f"{name} ended with exit code 7" in s and "started again" in s]


async def test_what_ends_again_and_again_fails_the_run(context: Context) -> None:
    said: list[str] = []
    supervisor = Supervisor(context, [process("proxy", "sys.exit(7)"), process("runner", WAIT, 1)], said.append)
    await supervisor.start()
    with pytest.raises(RunFailed, match="proxy ended with exit code 7"):
        await supervisor.watch()
    await supervisor.stop()
    assert sum("started again" in s for s in said) == 3


@pytest.mark.parametrize("name", ["feed", "cell-0"])
async def test_what_cannot_go_on_fails_the_run(context: Context, name: str) -> None:
    supervisor = Supervisor(context, [process(name, "sys.exit(7)"), process("runner", WAIT)], lambda _: None)
    await supervisor.start()
    with pytest.raises(RunFailed, match=f"{name} ended with exit code 7"):
        await supervisor.watch()
    await supervisor.stop()


class Scripted:
    """A scheduler and a cell agent that answer what they are told to."""

    def __init__(self, context: Context, **replies: object) -> None:
        self._replies = replies
        self._servers = (
            Server(context.bus.address("scheduler"), p.Request, self._answer),
            Server(context.bus.address("agent-0"), p.AgentRequest, self._answer),
        )

    async def _answer(self, request: object) -> object:
        return self._replies.get(type(request).__name__, p.Ack())

    async def __aenter__(self) -> None:
        for server in self._servers:
            await server.start()

    async def __aexit__(self, *exc: object) -> None:
        for server in self._servers:
            await server.close()


async def test_a_cell_that_does_not_end_well_is_told(context: Context) -> None:
    cells = [process("scheduler"), process("cell-0"), process("cell-1", FAILS)]
    supervisor = Supervisor(context, cells, lambda _: None)
    async with Scripted(context, StopCell=p.Failed(detail="the policy was not exported: no space")):
        await supervisor.start()
        assert await supervisor.children["cell-1"].wait() == 4
        faults = await supervisor.stop()
    assert len(faults) == 2
    assert "not exported" in faults[0]
    assert "cell-1 ended with exit code 4" in faults[1]


async def test_a_scheduler_that_can_dispatch_nothing_more_ends_the_run(context: Context) -> None:
    reason = "the core failed to enter training 3 times"
    zeros = dict.fromkeys(("dispatched", "started", "terminated", "water", "capacity", "version", "epoch"), 0)
    supervisor = Supervisor(context, [], lambda _: None)
    async with Scripted(context, GetStatus=p.Status(**zeros, burst=None, cells=(), halted=reason)):
        with pytest.raises(RunFailed, match=reason):
            await supervisor.watch_scheduler()


async def test_a_process_that_cannot_start_stops_the_others_of_its_stage(context: Context) -> None:
    broken = Planned(
        name="feed", argv=(sys.executable, "-c", "raise SystemExit('port 80 in use')"), stage=0, ready_within=30
    )
    supervisor = Supervisor(context, [process("proxy"), broken], lambda _: None)
    with pytest.raises(ProcessError, match="port 80 in use"):
        await supervisor.start()
    await supervisor.stop()
    assert "proxy" not in supervisor.children or supervisor.children["proxy"].returncode is not None
