"""What holds for the repository as a whole."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "gyre_traj": ROOT / "packages/gyre-traj/src/gyre_traj",
    "gyre_transport": ROOT / "packages/gyre-transport/src/gyre_transport",
    "gyre_sched": ROOT / "packages/gyre-sched/src/gyre_sched",
    "gyre_agent_proxy": ROOT / "packages/gyre-agent-proxy/src/gyre_agent_proxy",
    "gyre_train": ROOT / "packages/gyre-train/src/gyre_train",
    "gyre_launch": ROOT / "src/gyre_launch",
}
# The design's import direction: what each package may import of ours, by module prefix.
MAY_IMPORT = {
    "gyre_traj": set(),
    "gyre_transport": set(),
    "gyre_sched": {"gyre_transport"},
    "gyre_agent_proxy": {"gyre_traj", "gyre_transport", "gyre_sched.protocol"},
    "gyre_train": {"gyre_traj", "gyre_transport", "gyre_sched.protocol"},
    "gyre_launch": {"gyre_traj", "gyre_transport", "gyre_sched", "gyre_agent_proxy", "gyre_train"},
}
WHERE_INSTALLED = {"gyre_sched/simulate/trace.py": "gyre_traj.read_log"}  # call logs are one kind of trace
LIGHT = {
    "gyre_traj": {"msgspec", "numpy"},
    "gyre_transport": {"msgspec", "numpy", "pyzmq"},
}


def imported_modules(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_design(package: str) -> None:
    files = list(PACKAGES[package].rglob("*.py"))
    assert files
    wrong = []
    for file in files:
        for module in imported_modules(file):
            top = module.split(".")[0]
            if top not in PACKAGES or top == package:
                continue
            if any(str(file).endswith(path) and module == ok for path, ok in WHERE_INSTALLED.items()):
                continue
            if not any(module == ok or module.startswith(ok + ".") for ok in MAY_IMPORT[package]):
                wrong.append(f"{file.relative_to(ROOT)} imports {module}")
    assert not wrong


@pytest.mark.parametrize("package", LIGHT)
def test_light_packages_require_nothing_heavy(package: str) -> None:
    project = tomllib.loads((PACKAGES[package].parents[1] / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=!~\[ ;]", requirement)[0] for requirement in project["dependencies"]}
    assert names == LIGHT[package]


def git(*arguments: str) -> str:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def test_the_committed_lock_names_no_address() -> None:
    lock = git("cat-file", "blob", "HEAD:uv.lock")
    assert "[[package]]" in lock
    assert "://" not in lock


def test_the_lock_tool_strips_addresses_and_nothing_else() -> None:
    lock = (
        'version = 1\n\n[[package]]\nname = "a"\nversion = "1"\nsource = { registry = "https://index.invalid" }\n'
        'dependencies = [\n    { name = "b" },\n]\nsdist = { url = "https://index.invalid/a.tar.gz" }\nwheels = [\n'
        '    { url = "https://index.invalid/a.whl" },\n]\n\n[package.metadata]\nrequires-dist = [{ name = "b" }]\n\n'
        '[[package]]\nname = "b"\nversion = "2"\nsource = { registry = "https://index.invalid" }\n'
    )
    clean = subprocess.run(
        [sys.executable, "tools/lock.py", "clean"], input=lock, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert clean == (
        'version = 1\n\n[[package]]\nname = "a"\nversion = "1"\nsource = { registry = "." }\n'
        'dependencies = [\n    { name = "b" },\n]\n\n'
        '[[package]]\nname = "b"\nversion = "2"\nsource = { registry = "." }\n'
    )


def test_no_file_carries_a_path_of_one_machine_or_an_index() -> None:
    pattern = r"(^|[^a-zA-Z0-9_.])/(work|root|opt|home)/[a-z]|(pypi|pythonhosted|npmjs)\.(org|com)"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "grep", "-nIE", pattern, "--", ".", ":!uv.lock", ":!tests/launch/test_workspace.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 128:
        pytest.skip("not a git checkout")
    assert listed.stdout == ""


@pytest.mark.parametrize(
    "command", ["gyre", *(f"gyre-{p}" for p in ("sched", "traj", "transport", "train", "agent-proxy"))]
)
def test_help_imports_nothing_heavy(command: str) -> None:
    module = "gyre_launch" if command == "gyre" else command.replace("-", "_")
    script = (
        f"import sys; from {module}.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "heavy = {'torch', 'megatron', 'sglang', 'transformers', 'ray', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


@pytest.mark.parametrize("folder", ["", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "packages").iterdir())])
def test_every_package_has_its_papers(folder: str) -> None:
    base = ROOT / folder
    assert len((base / "README.md").read_text()) > 400
    assert "## 0.1.0" in (base / "CHANGELOG.md").read_text()
    assert list(base.glob("src/*/py.typed"))
    version = tomllib.loads((base / "pyproject.toml").read_text())["project"]["version"]
    (init,) = base.glob("src/*/__init__.py")
    assert f'__version__ = "{version}"' in init.read_text()
    told = subprocess.run(
        [sys.executable, "-m", f"{init.parent.name}.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip().endswith(version)
