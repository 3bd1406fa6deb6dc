"""import: logs of another kind -> call logs."""

from __future__ import annotations

from gyre_traj.commands import say, say_json


def openai(path: str, out: str, *, tokenizer: str, execution: str, role: str, as_json: bool) -> int:
    """Write a log an execution into the folder `out`, and say what can be trained on and what cannot, and why."""
    from gyre_traj.adapters.openai import ChatTemplate, import_lines
    from gyre_traj.output import refuse_existing

    refuse_existing(out)  # before a tokenizer is loaded
    report = import_lines(path, out, ChatTemplate(tokenizer), execution=execution, role=role)
    if as_json:
        say_json(report)
        return 0
    say(f"{out}: {report.executions:,} executions, {report.calls:,} calls, {report.trainable:,} of them trainable")
    for reason, count in report.untrainable.most_common():
        say(f"  not trainable: {count:,} calls: {reason}")
    for reason, count in report.skipped.most_common():
        say(f"  skipped: {count:,} lines: {reason}")
    return 0
