"""Build the pyverbs that belongs to this machine's rdma-core, and install it beside gyre-transport.

    python -m gyre_transport.backends.verbs.build [--wheels FOLDER] [--version VERSION]

A pyverbs from the index is bound to the rdma-core it was made with; that of a distribution is for the distribution's
Python. This takes the source distribution of the matching version (`library` has the table), compiles its core modules
only, with a Cython they compile with, and makes a wheel, which FOLDER keeps: the next call installs that one at once.
Takes a minute or two; needs a C compiler, the headers of this Python, and the package index.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
from pathlib import Path

from gyre_transport.backends.verbs.library import matching
from gyre_transport.errors import TransportError, Unreachable

_TOOLS = ("cython==3.0.12", "cmake>=3.25", "ninja", "wheel", "scikit-build-core>=0.10")  # newer Cython: not 56.0rc5
_STEP = 1_200  # seconds


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gyre_transport.backends.verbs.build", description=__doc__.splitlines()[0])
    parser.add_argument("--version", help="of pyverbs; default: the one that matches the installed rdma-core")
    parser.add_argument("--wheels", type=Path, default=_cache(), help="folder that keeps wheels (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        _say(f"installed {install(arguments.version or matching(), arguments.wheels)}")
    except TransportError as e:
        _say(str(e))
        return 1
    return 0


def install(version: str, wheels: Path) -> Path:
    """Install pyverbs `version` from `wheels`, where it is built first if need be. Raises `Unreachable`."""
    wheels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pyverbs-") as folder:
        tools = _Tools(Path(folder) / "tools")
        wheel = wheels / f"pyverbs-{version}-{_tag()}.whl"
        if not wheel.exists():
            built = _build(tools, version, Path(folder))
            os.replace(shutil.copy(built, wheel.with_suffix(".new")), wheel)
        tools.run("pip", "--python", sys.executable, "install", "-q", "--no-deps", "--force-reinstall", str(wheel))
    _check()
    return wheel


class _Tools:
    """An environment of its own for what builds."""

    def __init__(self, folder: Path) -> None:
        _say("an environment for the build")
        venv.create(folder, with_pip=True)
        self._bin = folder / "bin"

    def add(self, *requirements: str) -> None:
        """Install."""
        self.run("pip", "install", "-q", *requirements)

    def path(self, name: str) -> str:
        """Of a program."""
        return str(self._bin / name)

    def run(self, module: str, *arguments: str, cwd: Path | None = None) -> str:
        """Run a Python module there; returns what it says. Raises `Unreachable` with the end of it when it fails."""
        return self.call("python", "-m", module, *arguments, cwd=cwd)

    def call(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        """Run a program from there."""
        env = {**os.environ, "PATH": f"{self._bin}{os.pathsep}{os.environ.get('PATH', '')}"}
        env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        done = subprocess.run(
            [self.path(program), *arguments], cwd=cwd, env=env, timeout=_STEP, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            raise Unreachable(f"`{program} {' '.join(arguments[:3])} …` failed:\n{done.stdout[-4_000:]}")
        return done.stdout


def _build(tools: _Tools, version: str, folder: Path) -> Path:
    """A wheel of pyverbs' core modules."""
    tools.add(*_TOOLS)
    _say(f"the sources of pyverbs {version}")
    tools.run(
        "pip", "download", "-q", "--no-deps", "--no-binary", "pyverbs", "--no-build-isolation", f"pyverbs=={version}",
        cwd=folder,
    )  # fmt: skip
    with tarfile.open(next(folder.glob("pyverbs-*.tar.gz"))) as sources:
        sources.extractall(folder, filter="data")
    source, build = folder / f"pyverbs-{version}", folder / "build"
    _say("cmake")
    tools.call(
        "cmake", "-S", str(source / "rdma-core"), "-B", str(build), "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_C_FLAGS=-O1 -w", "-DCMAKE_SKIP_RPATH=1",  # the system's library
        "-DNO_PYVERBS=0", "-DNO_MAN_PAGES=1", "-DENABLE_STATIC=0", "-DENABLE_RESOLVE_NEIGH=0",  # needs no libnl
        *(f"-D{name}_EXECUTABLE={tools.path('python')}" for name in ("PYTHON", "Python", "Python3")),
        f"-DCYTHON_EXECUTABLE={tools.path('cython')}",
    )  # fmt: skip
    targets = re.findall(
        r"^(python/pyverbs/\w+\.cpython\S*\.so): ", tools.call("ninja", "-C", str(build), "-t", "targets", "all"), re.M
    )
    _say(f"{len(targets)} modules")
    tools.call("ninja", "-C", str(build), *targets)
    return _pack(tools, source, [build / t for t in targets], version, folder)


def _pack(tools: _Tools, source: Path, modules: list[Path], version: str, folder: Path) -> Path:
    tree = folder / "wheel"
    info = tree / f"pyverbs-{version}.dist-info"
    info.mkdir(parents=True)
    (tree / "pyverbs").mkdir()
    for file in (*modules, *(source / "rdma-core" / "pyverbs").glob("*.py")):
        shutil.copy(file, tree / "pyverbs")
    shutil.copy(source / "PKG-INFO", info / "METADATA")
    (info / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: gyre-transport\nRoot-Is-Purelib: false\nTag: {_tag()}\n"
    )
    tools.run("wheel", "pack", "-d", str(folder), str(tree))
    return next(folder.glob("*.whl"))


def _check() -> None:
    """Raise `Unreachable` unless a new process can import what was installed."""
    code = "from gyre_transport.backends.verbs.library import load; load()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_STEP)
    if done.returncode:
        raise Unreachable(f"pyverbs was installed and does not work: {done.stderr.strip().splitlines()[-1]}")


def _tag() -> str:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}-{re.sub('[-.]', '_', sysconfig.get_platform())}"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gyre" / "wheels"


def _say(what: str) -> None:
    print(time.strftime("%H:%M:%S"), what, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
