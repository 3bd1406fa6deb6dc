"""The command line of an engine, its config, and what is refused before a process starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gyre_sched.attempts import Attempts
from gyre_sched.engine import launch
from gyre_sched.engine.config import EngineConfig
from gyre_sched.errors import EngineStartError
from gyre_transport.config import section
from gyre_transport.errors import ConfigError
from gyre_transport.keys import make_token

MODEL = Path("a-model")


def flags(argv: list[str]) -> dict[str, str | None]:
    """--flag -> its value, None for a switch."""
    found: dict[str, str | None] = {}
    for word, after in zip(argv, [*argv[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") else after
    return found


def made(cuda: bool, environ: dict[str, str] | None = None, **config: object) -> tuple[list[str], dict[str, str]]:
    return launch.command(
        section({"engine": config}, "engine", EngineConfig), MODEL, 4000, cuda=cuda, environ=environ or {}
    )


COMMON = {
    "--model-path": "a-model",
    "--host": "127.0.0.1",
    "--port": "4000",
    "--weight-version": "0",
    "--dtype": "bfloat16",
    "--max-running-requests": "32",
    "--max-total-tokens": "65536",
    "--incremental-streaming-output": None,
    "--skip-server-warmup": None,
    "--log-level": "info",
    "--log-level-http": "warning",
    "--enable-memory-saver": None,
}


def test_command_with_cuda() -> None:
    argv, env = made(cuda=True)
    assert argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert flags(argv) == COMMON | {"--enable-weights-cpu-backup": None, "--tp-size": "1"}
    assert "PYTHONPATH" not in env
    assert "SGLANG_USE_CPU_ENGINE" not in env


def test_command_without_cuda() -> None:
    argv, env = made(cuda=False, environ={"PYTHONPATH": "mine", "KEPT": "1"})
    folder = Path(launch.__file__).parent / "cpu"
    assert argv[:2] == [sys.executable, str(folder / "serve.py")]
    assert flags(argv) == COMMON | {
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--disable-overlap-schedule": None,
        "--sleep-on-idle": None,
    }
    assert env["PYTHONPATH"].split(os.pathsep) == [str(folder), "mine"]
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert env["KEPT"] == "1"
    assert (folder / "sgl_kernel" / "__init__.py").is_file()
    assert (folder / "torch_memory_saver" / "__init__.py").is_file()


@pytest.mark.parametrize("cuda", [True, False])
def test_environment(cuda: bool) -> None:
    _, env = made(cuda=cuda, threads=2)
    assert (
        env.items()
        >= {
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }.items()
    )


@pytest.mark.parametrize(
    ("config", "cuda", "expected"),
    [
        ({"context_length": 2048}, False, {"--context-length": "2048"}),
        ({"max_tokens": 0}, True, {"--max-total-tokens": "absent"}),
        ({"mem_fraction": 0.8}, True, {"--mem-fraction-static": "0.8"}),
        ({"mem_fraction": 0.8}, False, {"--mem-fraction-static": "absent"}),
        ({"tensor_parallel": 4}, True, {"--tp-size": "4"}),
        ({"args": ["--random-seed", "7"]}, False, {"--random-seed": "7"}),
        ({"dtype": "float32", "log_level": "error"}, False, {"--dtype": "float32", "--log-level": "error"}),
    ],
)
def test_config_in_the_command(config: dict[str, object], cuda: bool, expected: dict[str, str]) -> None:
    found = flags(made(cuda=cuda, **config)[0])
    assert {name: found.get(name, "absent") for name in expected} == expected


def test_further_arguments_come_last() -> None:
    assert made(cuda=True, args=["--dtype", "auto"])[0][-2:] == ["--dtype", "auto"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"max_runing": 3}, "did you mean 'max_running'"),
        ({"max_running": 0}, "max_running must be at least 1, got 0"),
        ({"mem_fraction": 1.5}, "mem_fraction"),
        ({"start_timeout": 0.0}, "start_timeout must be a positive number"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_wrong_config(config: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        section({"engine": config}, "engine", EngineConfig)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(EngineStartError, match=rf"127.0.0.1:{port}.*in use.*engine.port = 0"):
            launch.hold_port(EngineConfig(port=port))


def test_a_port_is_kept_for_the_engine_from_its_choice_on() -> None:
    """Whoever asks for any port, or does not share addresses, is not given it; the engine binds it, and again."""
    with launch.hold_port(EngineConfig()) as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # a restart takes the same port
            engine = socket.create_server(("127.0.0.1", port))  # it shares addresses, as asyncio's servers do
            with engine, socket.create_connection(("127.0.0.1", port)):
                engine.accept()[0].close()
        with pytest.raises(EngineStartError, match="in use"), socket.create_server(("127.0.0.1", port)):
            launch.hold_port(EngineConfig(port=port))


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang: uv sync --group engine")
def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"no config\.json"):
        launch.check(EngineConfig(), tmp_path)
    (tmp_path / "config.json").touch()
    launch.check(EngineConfig(device="cpu"), tmp_path)
    with pytest.raises(EngineStartError, match=r"engine\.max_tokens"):
        launch.check(EngineConfig(device="cpu", max_tokens=0), tmp_path)


def test_device_from_the_config() -> None:
    assert launch.uses_cuda(EngineConfig(device="cuda"))
    assert not launch.uses_cuda(EngineConfig(device="cpu"))
    assert launch.uses_cuda(EngineConfig()) == launch.has_cuda()


def test_attempts_within_a_window() -> None:
    attempts = Attempts(2, window=100.0)
    assert [attempts.again(t) for t in (0, 10, 20)] == [True, True, False]
    assert attempts.again(121), "the first three are forgotten"
    assert not Attempts(0, window=100.0).again(0)


@pytest.mark.parametrize(
    ("cell", "size", "visible", "expected"),
    [(0, 1, "0,1", "0"), (1, 1, "4,7", "7"), (1, 2, "0,1,2,3", "2,3"), (0, 1, "GPU-a", "GPU-a")],
)
def test_each_cell_sees_its_own_devices(cell: int, size: int, visible: str, expected: str) -> None:
    config = EngineConfig(tensor_parallel=size)
    assert launch.devices(cell, config, {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(EngineStartError, match="cell 1 needs devices 2 to 3, of which 3 are visible"):
        launch.devices(1, EngineConfig(tensor_parallel=2), {"CUDA_VISIBLE_DEVICES": "0,1,2"})


# --- engines that others can reach ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda", [True, False])
def test_a_token_goes_by_the_environment_and_not_by_the_command_line(cuda: bool, tmp_path: Path) -> None:
    token = make_token(tmp_path / "engine.key")
    plain, _ = made(cuda=cuda)
    argv, env = made(cuda=cuda, key=str(tmp_path / "engine.key"))
    assert env["GYRE_ENGINE_KEY"] == token
    assert not any(token in word for word in argv)
    assert argv[1].endswith("keyed.py")
    assert argv[2] == ("sglang.launch_server" if cuda else plain[1])
    assert argv[3:] == plain[3 if cuda else 2 :]


def test_a_program_that_is_keyed_has_the_token_and_its_children_do_not(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nif __name__ == '__main__': print(sys.argv[1:], 'GYRE_ENGINE_KEY' in os.environ)"
    )
    env = {**os.environ, "GYRE_ENGINE_KEY": "secret", "PYTHONPATH": str(tmp_path)}
    for name in (str(program), "program"):
        done = subprocess.run(
            [sys.executable, str(launch._KEYED), name, "--port", "1"],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "['--port', '1', '--api-key', 'secret'] False\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "node-1"])  # noqa: S104
def test_an_engine_that_others_can_reach_needs_a_token(host: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineStartError, match=r"nothing asks them for a token: set engine\.key"):
        launch.check(EngineConfig(host=host), tmp_path)
    make_token(tmp_path / "engine.key")
    launch.check(EngineConfig(host=host, key=str(tmp_path / "engine.key")), tmp_path)


def test_a_file_that_holds_no_token(tmp_path: Path) -> None:
    path = tmp_path / "engine.key"
    for wrong in ("", "short", "x" * 20 + " " + "y" * 20, "\N{SNOWMAN}" * 40):
        path.write_text(wrong)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=r"engine\.key\) holds no token"):
            made(cuda=True, key=str(path))
