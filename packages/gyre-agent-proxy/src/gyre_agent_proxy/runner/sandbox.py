"""The sandbox: what a harness and a verifier see of this machine.

    read-only      the system (/usr, /etc, …), Python and the program's own installation, what the command names
    read and write the workspace, a private home, a /tmp of its own; nothing else of this machine exists
    processes      only its own; the end of the sandbox is the end of all of them, daemons included
    network        none but the proxy's port, bridged to its unix socket; or this machine's (sandbox_network = "host")

It is bubblewrap's (`bwrap`). A runner that is root gives it up inside, so that the system's secrets cannot be read. The
environment is not passed on bwrap's command line, which others can read, but inherited: it is a clean one already.
Without bubblewrap processes only form a group that is ended together, and can do all that the runner's user can.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from gyre_agent_proxy.runner import enter, installs, limits
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import SandboxError

log = logging.getLogger(__name__)

NOBODY = 65534  # whom root becomes
FAILED = 1, b"bwrap: "  # exit code and first word of the output when the sandbox could not be made
_PROBE = 30.0  # seconds
_ENTER, _PROXY = "/run/gyre/enter.py", "/run/gyre/proxy"
_INSTALL = "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap)"
_ALLOW = (
    "allow it namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a "
    "container: --cap-add SYS_ADMIN and a seccomp profile that lets them be made)"
)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What one program sees beside the system."""

    cwd: Path
    write: tuple[Path, ...]
    read: tuple[Path, ...] = ()
    links: dict[Path, Path] = {}
    hidden: tuple[Path, ...] = ()  # not to be seen in a folder that is shown
    proxy: bool = False  # whether it speaks to the proxy: a harness does, a verifier does not
    places: dict[Path, Path] = {}  # folders, and where they are seen
    execution: str = ""
    part: str = ""  # of the execution: what tells its verifiers from its harness
    stdin: bool = False  # whether it reads anything there


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """How programs of a run are shut in; as it is by default, they are not."""

    bwrap: str = ""  # path; empty: a plain process group
    uid: int = -1  # the plain user to become inside; -1: none
    read: tuple[Path, ...] = ()  # shown to every program
    network: bool = True  # the machine's
    evaluator_network: bool = False  # verifiers have the machine's
    port: int = 0  # of the proxy, as programs are told …
    socket: Path | None = None  # … and where it is reached, in a folder of its own
    file_limit: int = 0  # bytes that a file may have; 0: any

    @property
    def python(self) -> str:
        """The Python that a program finds whatever else it sees."""
        return sys.executable

    def places(self, workspace: Path, tests: Path | None = None, logs: Path | None = None) -> dict[Path, Path]:
        """Where a program sees these folders: where they are."""
        return {path: path for path in (workspace, tests, logs) if path is not None}

    def limited(self, seconds: int, memory: int, program: Sequence[str]) -> list[str]:
        """`program` with limits (limits.py); memory: bytes of address space."""
        return [sys.executable, "-I", "-S", limits.__file__, str(seconds), str(memory), *program]

    def launch(self, argv: Sequence[str], env: Mapping[str, str], view: View) -> tuple[list[str], dict[str, str]]:
        """(`argv` in the sandbox, the environment of the command that starts it)."""
        return self.command(argv, view), dict(env)

    async def ended(self, execution: str) -> None:
        """Nothing of `execution` runs: its end was the end of all in it."""

    def command(self, argv: Sequence[str], view: View) -> list[str]:
        """`argv` in the sandbox."""
        if not self.bwrap:
            return list(argv)
        network = self.network or (self.evaluator_network and not view.proxy)
        out = [self.bwrap, *_namespaces(user=self.uid < 0, network=network), *_system()]
        if self.uid >= 0:
            out += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        bridged = view.proxy and not self.network and self.socket is not None
        read = {*self.read, *view.read, *_python()}
        masks = {path for path in view.hidden if installs.within(path, read) or installs.within(path, installs.SYSTEM)}
        for path in sorted(read):
            if not installs.within(path, (*installs.SYSTEM, *read - {path})):
                out += [*_parents(path), "--ro-bind", str(path), str(path)]
        for path in sorted(masks):
            out += ["--tmpfs", str(path)]
        for path in sorted(p for p in read if installs.within(p, masks)):
            out += [*_parents(path), "--ro-bind", str(path), str(path)]
        out += [*_parents(Path(_ENTER)), "--ro-bind", enter.__file__, _ENTER]
        if bridged and self.socket is not None:
            out += ["--ro-bind", str(self.socket.parent), _PROXY]
        for link, target in sorted(view.links.items()):
            if installs.within(link, read):
                continue  # it is there
            out += [*_parents(link), "--symlink", str(target), str(link)]
        for path in view.write:
            out += [*_parents(path), "--bind", str(path), str(path)]
        out += ["--remount-ro", "/", "--chdir", str(view.cwd), "--"]
        out += [sys.executable, "-I", "-S", _ENTER, str(self.uid)]
        out += [str(self.port), f"{_PROXY}/{self.socket.name}"] if bridged and self.socket else ["0", ""]
        return [*out, str(self.file_limit), *argv]

    def give(self, *folders: Path) -> None:
        """Make what is in `folders` the program's own, if it does not run as this user."""
        if self.bwrap and self.uid >= 0:
            give(self.uid, *folders)


def host_path() -> str:
    """The PATH of programs that are given no other."""
    return os.environ.get("PATH", os.defpath)


def give(uid: int, *folders: Path) -> None:
    """Make what is in `folders` the property of user and group `uid`; links are not followed."""
    for folder in folders:
        os.lchown(folder, uid, uid)
        for root, names, files in os.walk(folder):
            for name in (*names, *files):
                os.lchown(os.path.join(root, name), uid, uid)


async def find(config: RunnerConfig, *, base_url: str = "", socket: Path | None = None) -> Sandbox:
    """The sandbox that `config` asks for, tried once.

    base_url: the proxy's, as harnesses are told; socket: where it listens, too. Without a socket the network is shared.
    Raises `SandboxError` when runner.sandbox is "bubblewrap" and cannot be had, when a path to show does not exist, and
    when the socket is not in a folder of its own.
    """
    read = shown(config)
    if config.sandbox == "none":
        log.warning("no sandbox, as configured: harnesses can do all that this user can")
        return Sandbox()
    bwrap = shutil.which("bwrap")
    problem, remedy = "there is no bwrap on PATH", _INSTALL
    if bwrap is not None:
        port, network = reach(config, base_url, socket)
        uid = NOBODY if os.geteuid() == 0 else -1
        made = Sandbox(
            bwrap=bwrap,
            uid=uid,
            read=read,
            network=network,
            evaluator_network=config.evaluator_network == "host",
            port=port,
            socket=socket,
            file_limit=config.workspace_limit_mb << 20,
        )
        if not (problem := await asyncio.to_thread(_try, made)):
            return made
        remedy = _ALLOW
    if config.sandbox == "bubblewrap":
        raise SandboxError(f'runner.sandbox is "bubblewrap", but {problem}; {remedy}')
    log.warning(
        "NO SANDBOX: harnesses, and whatever a model has them do, can do all that this user can, since %s; %s, "
        'or set runner.sandbox = "none" to say that this is meant',
        problem,
        remedy,
    )
    return Sandbox()


def harness_view(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: Path,
    write: Sequence[Path],
    read: Iterable[Path],
    folder: Path | None,
    hidden: Sequence[Path],
    places: Mapping[Path, Path] | None = None,
    execution: str = "",
    stdin: bool = False,
) -> View:
    """What a harness sees: its installation, and what its command and its environment name.

    folder: the one the command refers to, of which everything is shown but hidden entries. hidden: the run directory
    and the tasks; no folder that holds them is shown for being named, and in one that is shown as an installation they
    are empty.
    """
    needs = installs.needs(command[0])
    named = [Path(text) for text in (*command[1:], *env.values()) if text.startswith("/") and os.path.exists(text)]
    if folder is not None and folder.is_dir():
        entries = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
        named += [entry for entry in entries if entry.is_dir() or entry.is_file()]  # no sockets
    secret = [path.resolve() for path in hidden]
    shown = {
        path
        for path in named
        if not any(h.is_relative_to(path.resolve()) or path.resolve().is_relative_to(h) for h in secret)
    }
    return View(
        cwd=cwd,
        write=tuple(write),
        read=(*needs.paths, *shown, *read),
        links=needs.links,
        hidden=tuple(secret),
        proxy=True,
        places=dict(places or {}),
        execution=execution,
        stdin=stdin,
    )


def _try(sandbox: Sandbox) -> str:
    """Run `true` in it; returns what is wrong, empty if nothing."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        argv = sandbox.command(["true"], View(cwd=Path(folder), write=(Path(folder),)))
        try:
            done = subprocess.run(argv, env={}, capture_output=True, text=True, timeout=_PROBE, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"bwrap cannot be run: {e}"
    return f"bwrap fails: {done.stderr.strip()[-300:]}" if done.returncode else ""


def reach(config: RunnerConfig, base_url: str, socket: Path | None) -> tuple[int, bool]:
    """(the proxy's port where its unix socket can stand for it, else 0; whether the machine's network is shared).

    Raises `SandboxError` when the socket is not in a folder of its own, which is shown.
    """
    port = _local_port(base_url) if socket is not None and socket.is_socket() else 0
    if port and socket is not None and (beside := [p.name for p in socket.parent.iterdir() if p != socket]):
        raise SandboxError(
            f"proxy.socket is {str(socket)!r}, but {beside[0]!r} lies beside it, and the sandbox would show that, "
            "too; name a path in a folder of its own"
        )
    network = config.sandbox_network == "host" or not port
    if network and config.sandbox_network != "host":
        log.warning(
            "harnesses share this machine's network: the proxy at %r is not on its loopback, or does not listen on the "
            "unix socket %s; see proxy.socket",
            base_url,
            socket,
        )
    return port, network


def shown(config: RunnerConfig) -> tuple[Path, ...]:
    """What every program sees, too. Raises `SandboxError` for what is not there."""
    if missing := [path for path in config.sandbox_read if not Path(path).is_absolute() or not Path(path).exists()]:
        raise SandboxError(f"runner.sandbox_read names {missing!r}; give absolute paths that exist")
    return tuple(Path(os.path.abspath(path)) for path in config.sandbox_read)


def _local_port(url: str) -> int:
    host, _, port = url.removeprefix("http://").partition(":")
    return int(port) if host in ("127.0.0.1", "localhost", "0.0.0.0") and port.isdigit() else 0  # noqa: S104


def _namespaces(*, user: bool, network: bool) -> list[str]:
    kinds = ("user", "ipc", "pid", "uts", "cgroup-try") if user else ("ipc", "pid", "uts", "cgroup-try")
    out = [f"--unshare-{kind}" for kind in kinds]
    return [*out, *(() if network else ("--unshare-net",)), "--die-with-parent", "--new-session"]


def _system() -> list[str]:
    out: list[str] = []
    for name in installs.SYSTEM:
        path = Path(name)
        if path.is_symlink():
            out += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            out += ["--ro-bind", name, name]
    out += ["--proc", "/proc", "--dev", "/dev"]
    for name in ("/dev/shm", "/tmp", "/var/tmp"):  # noqa: S108
        out += [*(("--perms", "0755", "--dir", "/var") if name == "/var/tmp" else ()), "--perms", "1777"]  # noqa: S108
        out += ["--tmpfs", name]
    return out


def _python() -> set[Path]:
    found = installs.needs(sys.executable)
    return {*found.paths, Path(sys.prefix), Path(sys.base_prefix)}


def _parents(path: Path) -> list[str]:
    """Make the folders above; bwrap would make them unreadable to a plain user."""
    out: list[str] = []
    for parent in reversed(path.parents):
        if len(parent.parts) > 1 and str(parent) not in ("/tmp", "/var", "/var/tmp"):  # noqa: S108
            out += ["--perms", "0755", "--dir", str(parent)]
    return out
