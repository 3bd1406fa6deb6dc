"""Start in stages, fail at the first early end, stop in order; with real processes of a few lines."""

import sys
from pathlib import Path

import pytest

from gyre_launch.errors import RunFailed
from gyre_launch.plan import Planned
from gyre_launch.supervisor import Supervisor
from gyre_transport.errors import ProcessError
from gyre_transport.run import Context

SERVE = "import signal, sys; from gyre_transport.process import *; follow_parent(); ready(); {then}"
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


async def test_a_process_that_cannot_start_stops_the_others_of_its_stage(context: Context) -> None:
    broken = Planned(
        name="feed", argv=(sys.executable, "-c", "raise SystemExit('port 80 in use')"), stage=0, ready_within=30
    )
    supervisor = Supervisor(context, [process("proxy"), broken], lambda _: None)
    with pytest.raises(ProcessError, match="port 80 in use"):
        await supervisor.start()
    await supervisor.stop()
    assert "proxy" not in supervisor.children or supervisor.children["proxy"].returncode is not None
