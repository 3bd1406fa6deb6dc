"""The sandbox, with bubblewrap itself: what is seen in it, what is reached from it, and that all of it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gyre_agent_proxy.config import ProxyConfig, socket_path
from gyre_agent_proxy.runner import installs
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import HarnessError, SandboxError
from gyre_agent_proxy.runner.execution import End, finish, harness, start
from gyre_agent_proxy.runner.sandbox import Sandbox, View, find
from gyre_agent_proxy.runner.scoring import Scorer
from gyre_agent_proxy.runner.tasks import Task, load_task
from gyre_agent_proxy.runner.workspace import prepare
from gyre_traj.intake import Ending
from gyre_transport.errors import ProcessError
from gyre_transport.run import BusConfig

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture
async def sandbox() -> Sandbox:
    """The one of this machine."""
    try:
        return await find(RunnerConfig(sandbox="bubblewrap"))
    except SandboxError as e:
        pytest.skip(str(e))


class Project:
    """A project folder with a task, a run directory below it, and one execution's harness in a sandbox."""

    def __init__(self, folder: Path, sandbox: Sandbox) -> None:
        self.folder = folder
        self.run = folder / "runs" / "first"
        self.sandbox = sandbox
        for name, text in {
            "tasks/t/task.toml": "",
            "tasks/t/instruction.md": "Do it",
            "tasks/t/environment/given.txt": "given",
            "tasks/t/tests/verify.py": "raise SystemExit(1)",
            "tasks/t/tests/secret.txt": "the hidden answer",
            "runs/first/secret": "the run's secret",
            "runs/first/workspaces/b0-g00-e1/answer.txt": "another's answer",
            "runs/first/calls/b0-g00-e1.gtraj": "another's calls",
            "notes.txt": "a note",
            ".env": "PASSWORD=1",
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        self.task: Task = load_task(folder / "tasks" / "t")
        self.workspace = self.run / "workspaces" / "b0-g00-e0"
        self.log = self.run / "logs" / "harness" / "b0-g00-e0.log"

    async def start(self, source: str, *, base_url: str = "http://127.0.0.1:9", **config: Any) -> Any:
        (self.folder / "agent.py").write_text(source)
        options = {"folder": str(self.folder), "harness": ("{python}", "{folder}/agent.py"), **config}
        made = harness(RunnerConfig(**options), "policy", base_url, self.run / "instructions")
        made = msgspec.structs.replace(made, sandbox=self.sandbox, hidden=(self.run, self.folder / "tasks"))
        made.instructions.mkdir(parents=True, exist_ok=True)
        (made.instructions / f"{self.task.name}.md").write_text(self.task.instruction)
        prepare(self.task, self.workspace)
        return await start(made, self.task, "b0-g00-e0", "the-key", self.workspace, self.log, self.run / "homes" / "e")

    async def end(self, source: str, **config: Any) -> tuple[End, str]:
        """Run a harness written as Python `source` to its end; returns it and what was printed."""
        end = await finish(await self.start(source, **config), 60.0)
        return end, self.log.read_text()


@pytest.fixture
def project(tmp_path: Path, sandbox: Sandbox) -> Project:
    return Project(tmp_path, sandbox)


LOOK = """
import json, os, pathlib, sys
found = {}
for name in json.loads(pathlib.Path("look.json").read_text()):
    try:
        found[name] = os.listdir(name) if os.path.isdir(name) else pathlib.Path(name).read_text()
    except OSError as e:
        found[name] = type(e).__name__
print(json.dumps(found))
"""


async def look(project: Project, *paths: Path | str) -> dict[str, Any]:
    (project.task.environment / "look.json").write_text(json.dumps(list(map(str, paths))))  # arguments would be shown
    end, printed = await project.end(LOOK)
    assert end.why == "exit 0", printed
    return dict(json.loads(printed))


async def test_a_harness_sees_its_own_and_nothing_of_other_executions_the_run_or_the_tests(project: Project) -> None:
    run, folder = project.run, project.folder
    hidden = [
        run / "secret",
        run / "workspaces" / "b0-g00-e1" / "answer.txt",
        run / "calls" / "b0-g00-e1.gtraj",
        project.task.tests / "secret.txt",
        project.task.folder / "instruction.md",
        folder / ".env",
        Path("/etc/shadow"),
        Path("/proc/1/environ"),
    ]
    shown = [folder / "notes.txt", project.workspace / "given.txt", run / "instructions" / "t.md"]
    found = await look(project, *hidden, *shown, run / "workspaces", folder)
    assert {found[str(path)] for path in hidden} <= {"FileNotFoundError", "PermissionError"}
    assert [found[str(path)] for path in shown] == ["a note", "given", "Do it"]
    assert found[str(run / "workspaces")] == ["b0-g00-e0"]
    assert sorted(found[str(folder)]) == ["agent.py", "notes.txt", "runs"]


async def test_what_it_is_and_what_it_may_write(project: Project) -> None:
    end, printed = await project.end("""
import json, os, pathlib, tempfile
def may(path):
    try:
        pathlib.Path(path).write_text("x")
        return True
    except OSError:
        return False
folder = os.path.dirname(__file__)
print(json.dumps({
    "uid": os.getuid(), "cwd": os.getcwd(), "home": os.environ["HOME"],
    "processes": len([n for n in os.listdir("/proc") if n.isdigit()]),
    "may": [may(p) for p in ("answer.txt", "/tmp/x", "/dev/shm/x", "/var/tmp/x")],
    "may not": [may(p) for p in ("/x", "/usr/x", "/etc/x", folder + "/agent.py", folder + "/x", "../x")],
}))
""")
    assert end.why == "exit 0", printed
    said = json.loads(printed)
    assert said["uid"] == (65534 if os.geteuid() == 0 else os.geteuid())
    assert (said["cwd"], said["home"]) == (str(project.workspace), str(project.workspace))
    assert said["processes"] <= 3, "bubblewrap's own, and its"
    assert said["may"] == [True] * 4
    assert said["may not"] == [False] * 6
    assert (project.workspace / "answer.txt").read_text() == "x"


async def test_paths_that_a_command_or_the_configuration_names_are_shown(
    project: Project, tmp_path_factory: Any
) -> None:
    other = tmp_path_factory.mktemp("other")
    for name in ("argument.txt", "variable.txt", "shown/x.txt", "not.txt"):
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text(name)
    project.sandbox = msgspec.structs.replace(project.sandbox, read=(other / "shown",))
    end, printed = await project.end(
        "import os, sys\nwith open(sys.argv[1]) as a, open(os.environ['V']) as v:\n"
        "    print(a.read(), v.read(), *sorted(os.listdir(sys.argv[2])))",
        harness=(
            "{python}",
            "{folder}/agent.py",
            str(other / "argument.txt"),
            os.path.relpath(other, project.workspace),
        ),
        env={"V": str(other / "variable.txt")},
    )
    assert end.why == "exit 0", printed
    assert printed == "argument.txt variable.txt argument.txt shown variable.txt\n"


async def test_an_installation_that_holds_the_tasks_and_the_run_is_shown_without_them(project: Project) -> None:
    """The program is in bin/ of the project, which is shown whole for it."""
    program = project.folder / "bin" / "agent"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nls -A "$1" "$1/tasks" "$1"/runs/* && cat $GYRE_INSTRUCTION\n')
    program.chmod(0o755)
    project.folder.chmod(0o755)  # what is shown is shown with its permissions
    end, printed = await project.end("", harness=("{folder}/bin/agent", "{folder}"))
    assert end.why == "exit 0", printed
    shown = {block.split("\n")[0]: block.split("\n")[1:] for block in printed.split("\n\n")}
    assert set(shown[f"{project.folder}:"]) == {".env", "agent.py", "bin", "notes.txt", "runs", "tasks"}
    assert shown[f"{project.run}:"] == ["instructions", "workspaces"]
    assert shown[f"{project.folder}/tasks:"] == ["Do it"], "nothing, and then the instruction"


DAEMONS = """
import os, subprocess, sys, time
token = sys.argv[1]
program = [sys.executable, "-c", "import time; time.sleep(600)", token]
subprocess.Popen(program)
subprocess.Popen(program, start_new_session=True)
if os.fork() == 0:  # a daemon: own session, no parent, no environment that would tell whose it is
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, program, {})
    os._exit(0)
os.wait()
while True:
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid not in ("1", str(os.getpid()))]
    if sum(token in open(f"/proc/{pid}/cmdline").read().split("\\0") for pid in others) == 3:
        break
    time.sleep(0.02)
open("up", "w").close()
time.sleep(600 if sys.argv[2] == "wait" else 0)
"""


def alive(token: str) -> list[int]:
    """Processes of this machine that have `token` as an argument."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if token.encode() in arguments:
            found.append(int(pid))
    return found


@pytest.mark.parametrize("how", ["budget", "exit", "guard killed"])
async def test_the_end_of_the_sandbox_is_the_end_of_all_in_it(project: Project, how: str) -> None:
    token = uuid.uuid4().hex
    command = ("{python}", "{folder}/agent.py", token, "exit" if how == "exit" else "wait")
    child = await project.start(DAEMONS, harness=command)
    async with asyncio.timeout(60):
        if how != "exit":
            while not (project.workspace / "up").exists():
                await asyncio.sleep(0.02)
            assert len(alive(token)) >= 4
        if how == "guard killed":
            os.kill(child.pid, signal.SIGKILL)
        end = await finish(child, 0.05 if how == "budget" else 60.0)
        while how == "guard killed" and alive(token):
            await asyncio.sleep(0.02)
    assert end.why == {"budget": "budget", "exit": "exit 0", "guard killed": "exit -9"}[how]
    assert alive(token) == []


async def test_a_file_may_not_outgrow_what_a_workspace_may_hold(project: Project) -> None:
    """Else one line of a harness fills the disk of all; what it prints goes to a file, too."""
    project.sandbox = msgspec.structs.replace(project.sandbox, file_limit=1 << 20)
    end, printed = await project.end("""
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with open("large", "wb", buffering=0) as f:
    try:
        while True:
            f.write(bytes(1 << 18))
    except OSError as e:
        print(f.tell(), e.strerror)
""")
    assert (end.why, printed) == ("exit 0", f"{1 << 20} File too large\n")


# --- the network ----------------------------------------------------------------------------------------------------


class Endpoint:
    """A proxy that listens on a port and on a unix socket, as the real one."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.asked: list[Any] = []
        self.answers: list[str] = []
        self.url = ""
        self._app: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/echo", self._echo)
        self._app = web.AppRunner(app, shutdown_timeout=0.1)
        await self._app.setup()
        await web.TCPSite(self._app, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._app.addresses[0][1]}"
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        await web.UnixSite(self._app, self.socket).start()
        self.socket.chmod(0o666)

    async def stop(self) -> None:
        if self._app is not None:
            await self._app.cleanup()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        message = {"role": "assistant", "content": self.answers[min(len(self.asked), len(self.answers)) - 1]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        for begin in range(0, len(body), 1 << 20):
            await response.write(body[begin : begin + (1 << 20)])
        return response


@pytest.fixture
async def endpoint(tmp_path_factory: Any) -> AsyncIterator[Endpoint]:
    made = Endpoint(tmp_path_factory.mktemp("s") / "proxy" / "http")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def private(project: Project, endpoint: Endpoint) -> Project:
    """A project whose sandbox reaches the endpoint and nothing else."""
    project.sandbox = await find(RunnerConfig(sandbox="bubblewrap"), base_url=endpoint.url, socket=endpoint.socket)
    assert not project.sandbox.network
    return project


REACH = """
import os, pathlib, socket, sys, time, urllib.request
try:
    os.wait()
    print("a child that is not its own")
except ChildProcessError:
    pass
def echo(size):
    body = os.urandom(size)
    return urllib.request.urlopen(os.environ["OPENAI_BASE_URL"][:-3] + "/echo", body, timeout=60).read() == body
assert echo(10) and echo(20 << 20)
for address in (("127.0.0.1", int(sys.argv[1])), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 5)
        print("reached", address)
    except OSError as e:
        print(e.strerror)
pathlib.Path("restart").touch()
while not os.path.exists("restarted"):
    time.sleep(0.02)
assert echo(10)
print("done")
"""


async def test_only_the_proxy_is_reached(private: Project, endpoint: Endpoint) -> None:
    """Whatever the size, and after it was restarted; and the bridge is no child that the harness could wait for."""
    other = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    command = ("{python}", "{folder}/agent.py", str(port))
    child = await private.start(REACH, base_url=endpoint.url, harness=command)
    while not (private.workspace / "restart").exists():
        assert child.returncode is None, child.tail()
        await asyncio.sleep(0.02)
    await endpoint.stop()
    await endpoint.start(endpoint.port)
    (private.workspace / "restarted").touch()
    end = await finish(child, 60.0)
    other.close()
    assert (end.why, private.log.read_text()) == ("exit 0", "Connection refused\nNetwork is unreachable\ndone\n")


async def test_a_client_that_leaves_and_a_proxy_that_is_away_are_passed_on(
    private: Project, endpoint: Endpoint
) -> None:
    left, waiting = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting.set()
        assert await reader.read() == b"hello"
        left.set()
        writer.close()

    await endpoint.stop()
    endpoint.socket.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, endpoint.socket)
    endpoint.socket.chmod(0o666)
    source = """
import os, pathlib, socket, time
there = ("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0]))
connection = socket.create_connection(there)
connection.sendall(b"hello")
connection.close()
while not os.path.exists("away"):
    time.sleep(0.02)
print(socket.create_connection(there).recv(1))
"""
    child = await private.start(source, base_url=endpoint.url)
    async with asyncio.timeout(60):
        await waiting.wait()
        await left.wait()
        server.close()
        endpoint.socket.unlink(missing_ok=True)
        (private.workspace / "away").touch()
        end = await finish(child, 60.0)
    assert (end.why, private.log.read_text()) == ("exit 0", "b''\n")


async def test_the_quickstart_s_harness_works_in_it(private: Project, endpoint: Endpoint) -> None:
    endpoint.answers = ["```python\ndef add(a, b):\n    return a + b\n\ndef is_even(n):\n    return n % 2 == 0"]
    private.task = load_task(QUICKSTART / "tasks" / "even")
    private.folder = QUICKSTART
    made = harness(
        RunnerConfig(folder=str(QUICKSTART), harness=("{python}", "{folder}/harness.py")),
        "policy",
        endpoint.url,
        private.run / "instructions",
    )
    made = msgspec.structs.replace(made, sandbox=private.sandbox, hidden=(private.run, QUICKSTART / "tasks"))
    made.instructions.mkdir()
    (made.instructions / "even.md").write_text(private.task.instruction)
    prepare(private.task, private.workspace)
    child = await start(made, private.task, "e", "the-key", private.workspace, private.log)
    end = await finish(child, 120.0)
    assert end.why == "exit 0", private.log.read_text()
    assert len(endpoint.asked) == 1
    scorer = Scorer(RunnerConfig(), private.run / "scoring", private.sandbox)
    outcome = await scorer.score(private.task, "e", private.workspace)
    assert (outcome.ending, outcome.score) == (Ending.SCORED, 1.0)


ASK = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60))
print(answer["choices"][0]["message"]["content"])
"""


async def test_the_proxy_itself_is_reached_through_its_socket(
    project: Project, bench: Any, tmp_path_factory: Any
) -> None:
    """From a sandbox without a network to an engine and back."""
    await bench.engine()
    bench.brain.says("hello from the engine")
    socket = tmp_path_factory.mktemp("s") / "proxy" / "http"
    async with bench.proxy(socket=str(socket)) as running:
        project.sandbox = await find(RunnerConfig(sandbox="bubblewrap"), base_url=running.url, socket=socket)
        end, printed = await project.end(ASK, base_url=running.url)
    assert (end.why, printed) == ("exit 0", "hello from the engine\n")


async def test_a_verifier_sees_its_tests_and_nothing_of_the_run(project: Project) -> None:
    verify = f"""
import json, os, pathlib
assert pathlib.Path(os.environ["TESTS_DIR"], "secret.txt").read_text() == "the hidden answer"
assert not os.path.exists({str(project.run / "secret")!r})
assert not os.path.exists({str(project.task.tests)!r})
pathlib.Path("given.txt").write_text("changed")
pathlib.Path(os.environ["LOGS_DIR"], "verifier", "reward.json").write_text("0.25")
"""
    (project.task.tests / "verify.py").write_text(verify)
    await project.end("open('answer.txt', 'w').write('42')")
    scorer = Scorer(RunnerConfig(evaluator_attempts=1), project.run / "scoring", project.sandbox)
    outcome = await scorer.score(project.task, "e", project.workspace)
    assert (outcome.ending, outcome.score) == (Ending.SCORED, 0.25), outcome.detail
    assert (project.workspace / "given.txt").read_text() == "given"


async def test_a_program_that_is_not_there_and_a_sandbox_that_cannot_be_made(project: Project, tmp_path: Path) -> None:
    program = project.folder / "agent"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(HarnessError, match=r"(?s)cannot be executed.*sandbox: cannot start"):
        await finish(await project.start("", harness=("{folder}/agent",)), 60.0)
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed: no space left' >&2\nexit 1\n")
    broken.chmod(0o755)
    said = "print('what it does'); print('bwrap: no'); raise SystemExit(1)"
    project.log.unlink()
    assert (await project.end(said))[0].why == "exit 1", "its own words"
    project.log.unlink()
    project.sandbox = msgspec.structs.replace(project.sandbox, bwrap=str(broken))
    with pytest.raises(ProcessError, match="sandbox could not be made"):
        await finish(await project.start("print('never')"), 60.0)


# --- finding one ----------------------------------------------------------------------------------------------------


async def test_without_bubblewrap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await find(RunnerConfig()) == Sandbox()
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "NO SANDBOX" in warning
    assert "no bwrap on PATH; install bubblewrap" in warning
    with pytest.raises(SandboxError, match='"bubblewrap", but there is no bwrap on PATH; install'):
        await find(RunnerConfig(sandbox="bubblewrap"))
    assert Sandbox().command(["x", "y"], View(cwd=tmp_path, write=(tmp_path,))) == ["x", "y"]


async def test_a_bubblewrap_that_may_not_make_namespaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await find(RunnerConfig()) == Sandbox()
    assert "bwrap fails: bwrap: No permissions to create new namespace; allow it namespaces" in caplog.text
    caplog.clear()
    assert await find(RunnerConfig(sandbox="none")) == Sandbox()
    assert "no sandbox, as configured" in caplog.text


@pytest.mark.parametrize("path", ["relative", "/no/such/path"])
async def test_what_cannot_be_shown_is_said_first(path: str) -> None:
    with pytest.raises(SandboxError, match=r"sandbox_read names .* absolute paths that exist"):
        await find(RunnerConfig(sandbox_read=(path,)))


async def test_the_network_is_shared_and_said_to_be_when_the_proxy_has_no_socket(
    sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = await find(RunnerConfig(), base_url="http://127.0.0.1:8100", socket=tmp_path / "none")
    assert found.network
    assert "share this machine's network" in caplog.text
    caplog.clear()
    assert (await find(RunnerConfig(sandbox_network="host"))).network
    assert caplog.text == ""


async def test_a_socket_that_is_not_in_a_folder_of_its_own(sandbox: Sandbox, endpoint: Endpoint) -> None:
    (endpoint.socket.parent / "other").touch()
    with pytest.raises(SandboxError, match="'other' lies beside it"):
        await find(RunnerConfig(), base_url=endpoint.url, socket=endpoint.socket)


@pytest.mark.parametrize(
    ("socket", "bus", "expected"),
    [
        ("", BusConfig(dir="/b"), "/b/proxy/http"),
        ("/s/http", BusConfig(dir="/b"), "/s/http"),
        ("/s/http", BusConfig(kind="tcp"), "/s/http"),
        ("", BusConfig(kind="tcp"), None),
        ("", BusConfig(dir="/b" * 60), None),  # longer than the system takes
    ],
)
def test_where_the_proxy_listens_beside_its_port(socket: str, bus: BusConfig, expected: str | None) -> None:
    assert socket_path(ProxyConfig(socket=socket), bus) == (None if expected is None else Path(expected))


# --- what a program needs -------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """tree({path: text, or "-> target"}): made below tmp_path, files executable."""

    def make(entries: dict[str, str]) -> Path:
        for name, text in entries.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                path.symlink_to(text[3:])
            else:
                path.write_text(text.replace("{}", str(tmp_path)))
                path.chmod(0o755)
        return tmp_path

    return make


def test_installations_are_shown_whole_and_other_files_alone(
    tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(
        {
            "me/.local/bin/codex": "-> ../../../npm/lib/node_modules/@x/codex/bin/codex.js",
            "npm/lib/node_modules/@x/codex/bin/codex.js": "#!/usr/bin/env node\n",
            "nvm/v22/bin/node": "an executable",
            "me/.local/bin/mini": "-> ../../tools/mini/bin/mini",
            "me/tools/mini/pyvenv.cfg": "",
            "me/tools/mini/bin/mini": "#!{}/me/tools/mini/bin/python\n",
            "me/tools/mini/bin/python": "-> ../../../../pythons/3.12/bin/python3.12",
            "pythons/3.12/bin/python3.12": "an executable",
            "me/.local/bin/script": "#!/bin/sh\n",
            "me/bin/own": "#!/usr/bin/env -S A=1 sh -e\n",
        }
    )
    monkeypatch.setenv("HOME", str(root / "me"))
    monkeypatch.setenv("PATH", f"{root}/me/.local/bin:{root}/nvm/v22/bin:/usr/bin:/bin")

    def shown(program: str) -> tuple[set[str], dict[str, str]]:
        found = installs.needs(program)
        return (
            {str(path.relative_to(root)) for path in found.paths},
            {str(path.relative_to(root)): str(to.relative_to(root)) for path, to in found.links.items()},
        )

    assert shown("codex") == (
        {"npm/lib/node_modules", "nvm/v22"},
        {"me/.local/bin/codex": "npm/lib/node_modules/@x/codex/bin/codex.js"},
    )
    assert shown("mini") == ({"me/tools/mini", "pythons/3.12"}, {"me/.local/bin/mini": "me/tools/mini/bin/mini"})
    assert shown("script") == ({"me/.local/bin/script"}, {})
    assert shown(str(root / "me/bin/own")) == ({"me/bin/own"}, {})
    assert shown("sh") == shown("no-such-program") == (set(), {})
