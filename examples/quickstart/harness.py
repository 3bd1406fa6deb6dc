"""A coding agent in miniature: writes the files a spec asks for, checks them, and tries again.

    ask for each file ─▶ check ─▶ passed? done
                           │ failed: a reviewer (sub-agent) says why; ask again with the failure and the review
                           ▼
                         check ─▶ failed again: summarise what went wrong (compaction), forget the conversation,
                                  ask a last time with the spec and the summary

It speaks to any OpenAI-compatible endpoint (OPENAI_BASE_URL, OPENAI_API_KEY) and reads its task from $GYRE_INSTRUCTION.
The best version by the public check stays in the folder. An endpoint that fails is an error of this program: exit 1.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from openai import OpenAI

FUNCTION_TOKENS, REVIEW_TOKENS, SUMMARY_TOKENS = 24, 12, 16
CHECK_SECONDS = 180.0

# The example shows a small model the form of an answer.
START = [
    {"role": "system", "content": "You write short Python code."},
    {
        "role": "user",
        "content": "Define two functions.\n1. `half(n)`: return n divided by 2.\n"
        "2. `is_empty(text)`: return True if text is empty.",
    },
    {
        "role": "assistant",
        "content": "```python\ndef half(n):\n    return n / 2\n\ndef is_empty(text):\n    return text == ''\n```",
    },
]
REVIEWER = "You review Python code. Name the mistake in one short sentence."

client = OpenAI(max_retries=1, timeout=1800.0)  # a call may wait minutes while engines move
Message = dict[str, str]


def ask(messages: list[Message], tokens: int, stop: list[str], role: str | None = None) -> str:
    """One call; `role` tells the trajectory recorder what the call is for (default: the main agent)."""
    reply = client.chat.completions.create(
        model=os.environ.get("GYRE_MODEL", "policy"),
        messages=messages,  # type: ignore[arg-type]
        max_tokens=tokens,
        temperature=1.0,
        stop=stop,
        extra_headers={"x-gyre-role": role} if role else {},
    )
    return reply.choices[0].message.content or ""


def ask_code(history: list[Message], request: str, wanted: str) -> str:
    """Ask the main agent for the code that the spec `wanted` describes; request and answer join the history."""
    functions = len(re.findall(r"^\d+\.", wanted, re.MULTILINE))
    history.append({"role": "user", "content": request})
    answer = ask(history, 4 + FUNCTION_TOKENS * functions, stop=["\n```"])
    history.append({"role": "assistant", "content": answer})
    found = re.search(r"```\w*\n(.*)", answer, re.DOTALL)
    return found.group(1) if found else answer


def check() -> tuple[float, str, str]:
    """Run the public check; returns (fraction passed, file of the first failure, what it says)."""
    command = [sys.executable, "-I", "check.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=True)
    passed, total = map(int, re.findall(r"passed (\d+) of (\d+)", done.stdout)[-1])
    file, _, failure = done.stdout.splitlines()[0].partition(": ")
    return passed / total, file, failure[:60]


def main() -> None:
    """Work on the task in the current folder."""
    spec = Path(os.environ["GYRE_INSTRUCTION"]).read_text()
    parts = re.split(r"^## (\S+)\n", spec, flags=re.MULTILINE)
    files = dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))

    history: list[Message] = list(START)
    for file, wanted in files.items():
        Path(file).write_text(ask_code(history, wanted, wanted) + "\n")
    score, file, failure = check()

    for turn in (2, 3):
        if score == 1.0:
            break
        before = Path(file).read_text()
        if turn == 2:
            messages = [{"role": "system", "content": REVIEWER}, {"role": "user", "content": f"{before}\n{failure}"}]
            note = ask(messages, REVIEW_TOKENS, stop=["\n", "```"], role="sub-agent")
            request = f"{failure}. {note}\nWrite all of {file} again."
        else:
            messages = [*history, {"role": "user", "content": f"{failure}. Say why in one short sentence."}]
            note = ask(messages, SUMMARY_TOKENS, stop=["\n", "```"], role="main-summary")
            history = list(START)
            request = f"{files[file]}\nNote: {note}"
        Path(file).write_text(ask_code(history, request, files[file]) + "\n")
        again, next_file, failure = check()
        if again > score:
            score = again
        else:
            Path(file).write_text(before)
        file = next_file
    print(f"public check: {score:.2f}")


main()
