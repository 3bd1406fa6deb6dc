"""Grade the modules in the current folder by the cases beside this file: passed / total.

cases.json: [["numbers.py", "add", [2, 3], 5], …] = module, function, arguments, expected value.
Every task has this program twice: as `environment/check.py`, with the cases an agent may see, and as `tests/verify.py`,
with the hidden ones. It prints what failed and, for the runner, writes the fraction to $LOGS_DIR/verifier/reward.json.

A module runs in a process of its own that is told functions and arguments, never what is expected. It may loop, exit,
crash or print: that costs it the cases it did not answer, and nothing else.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

WALL = 20.0  # seconds for one module
# Reads [[function, arguments], …]; answers each with a JSON line. Half a second of CPU a call; 2 s and 512 MiB in all.
ANSWER = """
import json, os, resource, signal, sys
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for limit, value in ((resource.RLIMIT_CPU, 2), (resource.RLIMIT_AS, 512 << 20), (resource.RLIMIT_FSIZE, 1 << 20)):
    resource.setrlimit(limit, (value, value))
class TooLong(BaseException): pass
def too_long(*_): raise TooLong("did not end")
signal.signal(signal.SIGPROF, too_long)
module, problem = {}, None
def attempt(work):
    signal.setitimer(signal.ITIMER_PROF, 0.5)
    try:
        return {"value": work()}
    except BaseException as e:
        return {"error": f"{type(e).__name__}: {e}"[:60]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
calls = json.load(sys.stdin)
loaded = attempt(lambda: exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), module))
for name, arguments in calls:
    if "error" in loaded and name not in module:
        answer = loaded
    else:
        answer = attempt(lambda: module[name](*arguments)) if name in module else {"error": f"no function {name}"}
    try:
        line = json.dumps(answer)
    except (TypeError, ValueError, RecursionError):
        line = json.dumps({"error": f"a {type(answer['value']).__name__}"})
    answers.write(line + "\\n")
"""


def answers(module: str, calls: list[list]) -> list[dict]:
    """What `module` in the current folder answers to [function, arguments] calls, one dict a call."""
    if not Path(module).is_file():
        return [{"error": f"no file {module}"}] * len(calls)
    command = [sys.executable, "-I", "-S", "-c", ANSWER, module]
    try:
        done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True, timeout=WALL)
        lines = done.stdout.splitlines()
    except subprocess.TimeoutExpired as e:
        lines = (e.stdout or b"").decode().splitlines()
    return [json.loads(line) for line in lines] + [{"error": "did not end"}] * (len(calls) - len(lines))


def equal(got: object, expected: object) -> bool:
    """JSON equality in which True is not 1."""
    if isinstance(expected, list):
        return isinstance(got, list) and len(got) == len(expected) and all(map(equal, got, expected))
    return isinstance(got, bool) == isinstance(expected, bool) and got == expected


def main() -> None:
    """Print failures and the score; write the reward where the runner asks for it."""
    cases = json.loads(Path(__file__).with_name("cases.json").read_text())
    passed = 0
    for module in dict.fromkeys(case[0] for case in cases):
        mine = [case for case in cases if case[0] == module]
        for (_, name, arguments, expected), answer in zip(mine, answers(module, [c[1:3] for c in mine]), strict=True):
            if "value" in answer and equal(answer["value"], expected):
                passed += 1
                continue
            got = repr(answer["value"]) if "value" in answer else answer["error"]
            shown = ", ".join(map(repr, arguments))
            print(f"{module}: {name}({shown}) gave {got}, expected {expected!r}")
    print(f"passed {passed} of {len(cases)}")
    if logs := os.environ.get("LOGS_DIR"):
        Path(logs, "verifier", "reward.json").write_text(json.dumps({"reward": passed / len(cases)}))


main()
