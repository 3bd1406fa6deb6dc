#!/usr/bin/env python3
"""A container program as `docker` is spoken to: what it starts are plain processes in folders of its own.

$DOCKER_SCRIPTED is its state: images/<id>.json and rootfs/<id>/, containers/<name>.json, calls (one JSON list a line),
and `script.json`, which tells it what to do wrong: {"refuse": {"run": "no space"}, "hang": ["rm"], "fail_start": true,
"oom": true, "forget": 2 (times that rm does nothing)}. As the real one, it passes signals on, and its end does not end
the container.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

HOME = Path(os.environ["DOCKER_SCRIPTED"])
ARGS = sys.argv[1:]


def script():
    try:
        return json.loads((HOME / "script.json").read_text())
    except OSError:
        return {}


def fail(text, code=1):
    print(f"docker: Error response from daemon: {text}", file=sys.stderr)
    sys.exit(code)


def options(args, flags=()):
    """(values by option, the rest)."""
    found, i = {}, 0
    while i < len(args) and args[i].startswith("-"):
        if args[i] in flags:
            found.setdefault(args[i], []).append("")
            i += 1
        else:
            found.setdefault(args[i], []).append(args[i + 1])
            i += 2
    return found, args[i:]


def state(name):
    for path in (HOME / "containers").glob("*.json"):
        said = json.loads(path.read_text())
        if name in (said["name"], said["id"]):
            return path, said
    return None, None


def save(said):
    partial = HOME / "containers" / f"{said['id']}.partial"
    partial.write_text(json.dumps(said))
    partial.rename(partial.with_suffix(".json"))


def image(reference):
    for path in (HOME / "images").glob("*.json"):
        said = json.loads(path.read_text())
        if reference in (said["Id"], *said["RepoTags"]):
            return said
    return None


def new(found, reference):
    known = image(reference)
    if known is None:
        fail(f"No such image: {reference}", 125)
    name = found.get("--name", [uuid.uuid4().hex[:8]])[0]
    if state(name)[0] is not None:
        fail(f'Conflict. The container name "/{name}" is already in use', 125)
    labels = dict(part.split("=", 1) for part in found.get("--label", []))
    said = {"id": uuid.uuid4().hex * 2, "name": name, "image": known["Id"], "labels": labels, "status": "created"}
    save(said)
    return said, known


def run(args):
    found, (reference, *command) = options(args, ("--interactive",))
    said, known = new(found, reference)
    if script().get("fail_start"):
        fail("OCI runtime create failed", 126)
    root = HOME / "rootfs" / known["Id"]
    moves = {}
    for mount in found.get("--mount", []):
        parts = dict(part.partition("=")[::2] for part in mount.split(","))
        moves[parts["target"]] = parts["source"]

    def inside(text):
        """Mounts and the image's files as paths of this machine."""
        for target, source in sorted(moves.items(), key=lambda m: -len(m[0])):
            if text == target or text.startswith(target + "/"):
                return source + text[len(target) :]
        return text

    env = {}
    for each in found.get("--env", []):
        name, equals, value = each.partition("=")
        if equals or name in os.environ:
            env[name] = inside(value) if equals else inside(os.environ[name])
    argv = [inside(part) for part in (*found.get("--entrypoint", []), *command)]
    process = subprocess.Popen(
        argv,
        env={"PATH": os.environ["PATH"], **env, "ROOTFS": str(root)},
        cwd=inside(found["--workdir"][0]),
        stdin=None if "--interactive" in found else subprocess.DEVNULL,
        start_new_session=True,
    )
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(process.pid, number))  # the client passes it on
    save({**said, "status": "running", "pid": process.pid})
    code = process.wait()
    if state(said["name"])[0] is not None:
        save({**said, "status": "exited", "oom": bool(script().get("oom"))})
    sys.exit(137 if code == -9 else code if code >= 0 else 128 - code)


def create(args):
    found, (reference, *_) = options(args)
    print(new(found, reference)[0]["id"])


def cp(args):
    source, target = args
    name, _, path = source.partition(":")
    said = state(name)[1]
    folder = HOME / "rootfs" / said["image"] / path.removesuffix("/.").lstrip("/")
    if not folder.is_dir():
        fail(f"Could not find the file {path} in container {name}")
    shutil.copytree(folder, target, symlinks=True, dirs_exist_ok=True)


def rm(args):
    _, names = options(args, ("--force", "--volumes"))
    for name in names:
        path, said = state(name)
        if path is None:
            continue
        if said.get("pid") and said["status"] == "running":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(said["pid"], signal.SIGKILL)
        path.unlink()


def ps(args):
    found, _ = options(args, ("--all", "--no-trunc"))
    assert found["--format"] == ['{{.ID}} {{.Label "gyre.execution"}}'], found
    wanted = [part.removeprefix("label=").split("=", 1) for part in found.get("--filter", [])]
    for path in sorted((HOME / "containers").glob("*.json")):
        said = json.loads(path.read_text())
        if all(said["labels"].get(name) == value for name, value in wanted):
            print(said["id"], said["labels"].get("gyre.execution", ""))


def inspect(args):
    _, (name,) = options(args)
    said = state(name)[1]
    if said is None:
        fail(f"No such object: {name}")
    print(said["status"], "true" if said.get("oom") else "false")


def add_image(tag, workdir, root=None):
    said = {"Id": f"sha256:{uuid.uuid4().hex * 2}", "RepoTags": [tag], "Config": {"WorkingDir": workdir}}
    (HOME / "images" / f"{said['Id'][7:]}.json").write_text(json.dumps(said))
    to = HOME / "rootfs" / said["Id"] / workdir.lstrip("/")
    shutil.copytree(root or HOME / "empty", to, symlinks=True, dirs_exist_ok=True)


def build(args):
    found, (context,) = options(args)
    lines = Path(found["--file"][0]).read_text().splitlines()
    workdir = next((line.split()[1] for line in lines if line.startswith("WORKDIR ")), "")
    print("Step 1/1")
    if any(line.startswith("RUN false") for line in lines):
        fail("The command '/bin/sh -c false' returned a non-zero code: 1")
    if image(found["--tag"][0]) is None:  # the real one finds all its steps done before
        add_image(found["--tag"][0], workdir, Path(context))


def main():
    for folder in ("images", "rootfs", "containers", "empty"):
        (HOME / folder).mkdir(exist_ok=True)
    with (HOME / "calls").open("a") as f:
        f.write(json.dumps(ARGS) + "\n")
    command, rest = ARGS[0], ARGS[1:]
    if command == "--version":
        print("Docker version 28.2.2, build e6534b4")
        return
    if command in script().get("hang", []):
        time.sleep(600)
    if command in script().get("refuse", {}):
        fail(script()["refuse"][command], 125)
    if command == "rm" and script().get("forget", 0):
        (HOME / "script.json").write_text(json.dumps({**script(), "forget": script()["forget"] - 1}))
        return
    if command == "info":
        print(json.dumps(["name=seccomp,profile=builtin", *script().get("security", [])]))
    elif command == "image":
        found = image(rest[1])
        if found is None:
            fail(f"No such image: {rest[1]}")
        print(json.dumps([found]))
    elif command == "pull":
        if rest[0].startswith("absent"):
            fail(f"pull access denied for {rest[0]}")
        add_image(rest[0], "/app", HOME / "pulled")
    else:
        {"run": run, "create": create, "cp": cp, "rm": rm, "ps": ps, "inspect": inspect, "build": build}[command](rest)


main()
