"""Parts that several tests share; they live in `parts/`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _part(name: str) -> ModuleType:
    full = f"gyre_test_sched_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / "parts" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def world() -> Any:
    """The simulated run; `world(seed=3, …).run()`."""
    return _part("world").World


@pytest.fixture(scope="session")
def new_desk() -> Any:
    """A policy taken step by step; `new_desk(cells=3, …)`."""
    return _part("desk").Desk


@pytest.fixture(scope="session")
def trained() -> Any:
    """A desk with two cells in training after a burst; `trained(settle_timeout=…)`."""
    return _part("desk").trained


@pytest.fixture(scope="session")
def new_bench() -> Any:
    """A running service and clients of it; `new_bench(service)`."""
    return _part("bench").Bench


@pytest.fixture(scope="session")
def heard() -> Any:
    """A scheduler that remembers what it is told; `heard()` in the loop that serves it."""
    return _part("heard").Heard
