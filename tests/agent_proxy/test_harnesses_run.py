"""`gyre-agent-proxy run` and `harnesses`: outcome, tree and exit codes; and what a harness's file becomes."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gyre_agent_proxy.cli import main
from gyre_agent_proxy.runner import harnesses
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import HarnessError
from gyre_agent_proxy.runner.execution import finish, harness, start
from gyre_agent_proxy.runner.tasks import load_task
from gyre_agent_proxy.runner.workspace import prepare

CLI = [sys.executable, "-m", "gyre_agent_proxy.cli"]
AGENT = """
import json, os, pathlib, sys, urllib.request
body = {"model": os.environ["GYRE_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
pathlib.Path("answer.txt").write_text(said)
print(said)
"""
VERIFY = """
import json, os, pathlib
score = 0.75 if pathlib.Path("answer.txt").read_text() == "hello" else 0
pathlib.Path(os.environ["LOGS_DIR"], "verifier", "reward.json").write_text(json.dumps(score))
"""


async def run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *CLI,
        "run",
        "--sandbox",
        "none",
        *arguments,
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Path]:
    def make(verify: str | None = VERIFY, instruction: str = "Say hello") -> Path:
        folder = tmp_path / "tasks" / "greet"
        files = {"task.toml": "", "instruction.md": instruction}
        for name, text in (files | ({"tests/verify.py": verify} if verify is not None else {})).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder

    return make


@pytest.fixture
def bench_folder(model_folder: Callable[[str | None], Path]) -> Path:
    return model_folder("smollm2")


def command(tmp_path: Path, source: str = AGENT) -> str:
    (tmp_path / "agent.py").write_text(source)
    return "{python} agent.py {instruction}".replace("agent.py", str(tmp_path / "agent.py"))


async def test_a_task_with_a_verifier(bench, tmp_path, make_task):
    engine = await bench.engine()
    arguments = ("--command", command(tmp_path), "--engine", engine.url, "--model", str(bench.folder))
    arguments += ("--task", str(make_task()), "--name", "policy")
    # The first prompt that reaches the engine may be a probe's: what the harness is told is a function of its prompt.
    bench.brain.rest = lambda ids: [*bench.renderer.vocabulary.encode("hello"), 2]
    code, out, err = await run(*arguments, cwd=tmp_path)
    assert code == 0, err
    assert "outcome    scored 0.75" in out
    assert "harness    exit 0" in out
    assert "1 turn" in out
    assert "unknown_roles 1" in out
    assert "harness started" in err
    assert "scoring" in err
    (kept,) = (tmp_path / "runs").iterdir()
    assert kept.name.startswith("python-")
    assert (kept / "logs" / "harness.log").read_text() == "hello\n"

    code, out, err = await run(*arguments, "--json", "--out", str(tmp_path / "out"), cwd=tmp_path)
    report = json.loads(out)
    assert code == 0, err
    assert report["outcome"] == {"ending": "scored", "score": 0.75, "detail": ""}
    assert report["harness"]["why"] == "exit 0"
    assert report["tree"]["calls"] == 1
    assert Path(report["workspace"], "answer.txt").read_text() == "hello"


@pytest.mark.parametrize(
    ("source", "verify", "budget", "expected", "says"),
    [
        ("raise SystemExit(5)", None, "60", 3, "harness    exit 5"),
        ("import time; time.sleep(600)", None, "0.5", 3, "harness    budget"),
        ("open('x', 'w')", "raise SystemExit(1)", "60", 4, "outcome    evaluator_failed"),
        ("pass", VERIFY, "60", 4, "outcome    nothing_to_score"),
        ("pass", None, "60", 0, "not scored: the task has no verifier"),
    ],
)
async def test_exit_codes(bench, tmp_path, make_task, source, verify, budget, expected, says):
    engine = await bench.engine()
    code, out, err = await run(
        *("--command", command(tmp_path, source), "--engine", engine.url, "--model", str(bench.folder)),
        *("--task", str(make_task(verify)), "--budget", budget),
        cwd=tmp_path,
    )
    assert code == expected, err
    assert says in out
    assert "calls      none" in out


async def test_a_folder_is_copied_for_the_agent(bench, tmp_path):
    engine = await bench.engine()
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "a.txt").write_text("a")
    code, _, err = await run(
        *(
            "--command",
            command(tmp_path, "open('a.txt', 'a').write('b')"),
            "--engine",
            engine.url,
            "--instruction",
            "Go",
        ),
        *("--model", str(bench.folder), "--workspace", "repository", "--out", "out"),
        cwd=tmp_path,
    )
    assert code == 0, err
    assert (tmp_path / "out" / "workspaces" / "e0" / "a.txt").read_text() == "ab"
    assert (tmp_path / "repository" / "a.txt").read_text() == "a"


def test_bad_input_is_one_line(bench_folder, tmp_path, make_task, free_port, capsys, monkeypatch):
    """Before a harness is started."""
    monkeypatch.chdir(tmp_path)
    good = {
        "--command": "true", "--instruction": "Go", "--engine": f"http://127.0.0.1:{free_port}",
        "--model": str(bench_folder), "--budget": "9",
    }  # fmt: skip
    wrong: list[tuple[dict[str, str | None], str]] = [
        ({}, "cannot be reached"),
        ({"--engine": "nonsense"}, "'nonsense' cannot be reached"),
        ({"--model": str(tmp_path / "none")}, "is not a folder"),
        ({"--instruction": " "}, "instruction.md is empty"),
        ({"--instruction": None, "--task": str(make_task(instruction=""))}, "instruction.md is empty"),
        ({"--instruction": None, "--task": str(tmp_path / "none")}, "has no task.toml"),
        ({"--command": "no-such-agent"}, "'no-such-agent' is not on PATH"),
        ({"--command": ""}, "harness is empty"),
        ({"--command": "a 'b"}, "No closing quotation"),
        ({"--command": None, "--harness": "nobody"}, "known are claude-code, codex"),
        ({"--command": None, "--harness": "none.toml"}, "cannot read the harness file"),
        ({"--budget": "-1"}, "budget must be a positive number"),
        ({"--env": "nothing"}, "NAME=VALUE"),
        ({"--workspace": "none"}, "cannot make the task"),
        ({"--out": str(tmp_path)}, "is not an empty folder"),
    ]
    for n, (change, says) in enumerate(wrong):
        given = {k: v for k, v in (good | {"--out": str(tmp_path / f"out{n}")} | change).items() if v is not None}
        code = main(["run", *(part for pair in given.items() for part in pair)])
        out, err = capsys.readouterr()
        assert (code, out) == (1, ""), (change, err)
        assert says in err
        assert "Traceback" not in err


async def test_a_folder_that_is_no_model(bench, tmp_path):
    engine = await bench.engine()
    arguments = ("--command", "true", "--engine", engine.url, "--model", str(tmp_path), "--instruction", "Go")
    code, _, err = await run(*arguments, cwd=tmp_path)
    assert code == 1
    assert "needs a tokenizer.json" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--harness", "codex", "--command", "x", "--instruction", "i", "--engine", "u", "--model", "m"],
        ["--harness", "codex", "--engine", "u", "--model", "m"],
        ["--harness", "codex", "--task", "t", "--workspace", "w", "--engine", "u", "--model", "m"],
    ],
)
def test_wrong_usage(arguments):
    done = subprocess.run([*CLI, "run", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "usage:" in done.stderr


async def test_interrupted_it_ends_its_harness(bench, tmp_path):
    engine = await bench.engine()
    source = "import os, time; open('pid', 'w').write(str(os.getpid())); os.rename('pid', 'own'); time.sleep(600)"
    process = await asyncio.create_subprocess_exec(
        *CLI, "run", "--command", command(tmp_path, source), "--engine", engine.url, "--model", str(bench.folder),
        "--instruction", "Go", "--out", "out", "--sandbox", "none", cwd=tmp_path, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    own = tmp_path / "out" / "workspaces" / "e0" / "own"
    async with asyncio.timeout(60):
        while not own.exists():
            await asyncio.sleep(0.02)
    process.terminate()
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(own.read_text()), 0)


def test_harnesses_are_listed():
    done = subprocess.run([*CLI, "harnesses"], capture_output=True, text=True, timeout=60, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == harnesses.names()
    assert "npm install -g @openai/codex@" in done.stdout
    done = subprocess.run([*CLI, "harnesses", "--json"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["codex"]["dialect"] == "responses"


# --- what a harness's file becomes ---------------------------------------------------------------------------------


def test_six_harnesses_are_built_in():
    assert harnesses.names() == ["claude-code", "codex", "mini-swe-agent", "opencode", "openhands", "qwen-code"]
    for name in harnesses.names():
        adapter = harnesses.load(name)
        assert adapter.versions
        assert adapter.install.endswith(adapter.versions[0])
        assert adapter.version[0] == adapter.command[0]


@pytest.mark.parametrize("name", harnesses.names())
def test_every_written_file_can_be_read(name, tmp_path):
    """Whatever the values hold: they stand where strings stand, in JSON, TOML and YAML."""
    import tomllib

    import yaml

    from gyre_agent_proxy.runner.execution import _furnish

    odd = {
        n: f'{n} "quoted" \\ back\n{{key}} é'
        for n in ("instruction", "instruction_file", "model", "base_url", "key", "home", "workspace")
    }
    adapter = harnesses.load(name)
    _furnish(tmp_path / "home", adapter.files, odd | {"context": "1000", "output": "100"})
    for file in adapter.files:
        text = (tmp_path / "home" / file).read_text()
        match Path(file).suffix:
            case ".json":
                found = json.loads(text)
            case ".toml":
                found = tomllib.loads(text)
            case ".yaml":
                found = yaml.safe_load(text)
            case _:
                continue
        strings = json.dumps(found, ensure_ascii=False)
        for value in odd.values():
            quoted = json.dumps(value, ensure_ascii=False)[1:-1]
            assert (f"{{{value.split()[0]}}}" in adapter.files[file]) == (quoted in strings)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("command = []", "command must not be empty"),
        ("", "missing required field `command`"),
        ('command = ["x"]\nfiles = {"../x" = ""}', "relative to the harness's home"),
        ('command = ["x"]\nfiles = {"/x" = ""}', "relative to the harness's home"),
        ('command = ["x"]\ncomand = 1', "unknown field `comand`"),
        ('command = ["x"]\ndialect = "smoke"', "Invalid enum value 'smoke'"),
        ("command = [", "is wrong"),
    ],
)
def test_a_wrong_file_is_a_clear_error(tmp_path, text, says):
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(HarnessError, match=r"own\.toml' is wrong") as caught:
        harnesses.load(str(file))
    assert says in str(caught.value)


def test_what_is_missing_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HarnessError, match=r"'codex' is not on PATH.*npm install -g @openai/codex@\d"):
        harness(RunnerConfig(harness="codex"), "policy", "http://h", tmp_path)


async def test_a_private_home_holds_its_files_and_the_runner_s_values(tmp_path, make_task):
    """A harness file beside the config: its home is 0700 and its HOME, and nothing of it is in the workspace."""
    adapter = harnesses.Adapter(
        command=("{python}", "{folder}/agent.py"),
        stdin="{instruction_file}",
        env={"MY_KEY": "{key}", "MY_LIMITS": "{context} {output}"},
        files={"deep/config.json": '{"url": "{base_url}", "ask": "{instruction}", "context": {context}}'},
    )
    (tmp_path / "own.toml").write_bytes(msgspec.toml.encode(adapter))
    (tmp_path / "agent.py").write_text(
        "import json, os, sys\n"
        "config = json.load(open(os.environ['HOME'] + '/deep/config.json'))\n"
        "print(json.dumps([config, sys.stdin.read(), os.environ['MY_KEY'], os.environ['MY_LIMITS'], os.listdir('.'),\n"
        "    os.stat(os.environ['HOME']).st_mode, os.environ['EXTRA']]))\n"
    )
    config = RunnerConfig(harness="{folder}/own.toml", folder=str(tmp_path), env={"EXTRA": "{task}"})
    program = harness(config, "policy", "http://127.0.0.1:9/", tmp_path / "instructions", context=1000)
    task = load_task(make_task(instruction='Say "hi" {key}\nplease'))
    (tmp_path / "instructions").mkdir()
    (tmp_path / "instructions" / "greet.md").write_text(task.instruction)
    workspace, home, log = tmp_path / "w", tmp_path / "homes" / "e", tmp_path / "log"
    prepare(task, workspace)
    for _ in range(2):  # an old home is replaced
        log.unlink(missing_ok=True)
        child = await start(program, task, "e", "the-key", workspace, log, home)
        assert (await finish(child, 60)).why == "exit 0", log.read_text()
        written, read, key, limits, here, mode, extra = json.loads(log.read_text())
        assert written == {"url": "http://127.0.0.1:9", "ask": task.instruction, "context": 1000}
        assert read == task.instruction
        assert (key, limits, here, extra) == ("the-key", "1000 250", [], "greet")
        assert stat.S_IMODE(mode) == 0o700
        (home / "left.txt").touch()
