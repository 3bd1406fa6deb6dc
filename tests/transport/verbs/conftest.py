from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gyre_transport.backends.verbs import library
from gyre_transport.errors import Unreachable

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def vm() -> ModuleType:
    """The module `vm`."""
    return _load("vm")


@pytest.fixture(scope="session")
def image(vm: ModuleType) -> Any:
    """What machines start from. Without it the tests are skipped; GYRE_REQUIRE_VERBS=1 makes that a failure."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gyre" / "vm"
    try:
        library.load()
        return vm.prepare(cache)
    except (vm.Unavailable, Unreachable) as e:
        if os.environ.get("GYRE_REQUIRE_VERBS") == "1":
            pytest.fail(f"RDMA cannot be tested here: {e}")
        pytest.skip(f"RDMA IS NOT TESTED HERE: {e}")


@pytest.fixture
def run_pytest() -> Callable[..., str]:
    """A job's line that runs pytest in the guest; results go to `junit.xml` in the job's folder."""

    def line(*arguments: str) -> str:
        # compiled here, where it takes a moment, since the guest can write nothing beside the sources
        plugins = ("-p", "pytest_timeout", "-W", "ignore::pytest.PytestConfigWarning")
        argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", *plugins, *arguments[:1]]
        subprocess.run(argv, cwd=_ROOT, env={**os.environ, **_environment()}, stdout=subprocess.DEVNULL, check=True)
        options = (*plugins, "-p", "no:cacheprovider", "-v", "--tb=short", "--durations=15", *arguments)
        argv = shlex.join([sys.executable, "-m", "pytest", *options])
        return f'out=$PWD; cd {shlex.quote(str(_ROOT))} && {_exports()} {argv} --junitxml "$out/junit.xml"\n'

    return line


@pytest.fixture
def run_python() -> Callable[..., str]:
    """A job's line that runs a script of this folder in the guest."""

    def line(script: str, *arguments: str) -> str:
        return f"{_exports()} {shlex.join([sys.executable, str(_HERE / script), *arguments])}\n"

    return line


def _environment() -> dict[str, str]:
    """This folder's modules can be imported in the guest, and whatever can be here; plugins cost it seconds."""
    paths = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH", ""), str(_HERE)) if p)
    return {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _exports() -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in _environment().items())


@pytest.fixture
def machine(vm: ModuleType, image: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a virtual machine: machine(name, job, …) -> `vm.Machine`."""
    with ExitStack() as machines:

        def start(name: str, job: str, **options: Any) -> Any:
            out = tmp_path / name
            out.mkdir()
            return machines.enter_context(vm.Machine(image, out, job, **options))

        yield start
