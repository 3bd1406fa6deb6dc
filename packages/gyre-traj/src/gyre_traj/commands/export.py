"""export: many logs and their outcomes -> one file of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gyre_traj.commands import Progress, say, say_json

if TYPE_CHECKING:
    from gyre_traj.export import Choices, Totals

_NAMED = 3  # executions named for a reason; --json names all


def export(
    paths: Sequence[str],
    *,
    to: str,
    out: str,
    outcomes: str | None,
    choices: Choices,
    pad_token_id: int,
    as_json: bool,
) -> int:
    """Write rows to `out`, whole or not at all, and say what is in it and what is not."""
    import msgspec

    from gyre_traj.errors import BadOutcome, LogError
    from gyre_traj.export import Totals, plan, read_outcomes, rows
    from gyre_traj.output import fresh_file, fresh_folder
    from gyre_traj.writers import FOLDERS, WRITERS

    known = plan(read_outcomes(outcomes).values(), std=choices.std) if outcomes is not None else None
    chosen = {
        "j_max": choices.j_max,
        "seed": choices.seed,
        "roles": msgspec.to_builtins(choices.priority),
        "counting": choices.counting,
        "aggregation": choices.aggregation,
        "norm": choices.norm,
        "std": choices.std,
        "pad_token_id": pad_token_id,
    }
    with (fresh_folder if to in FOLDERS else fresh_file)(out) as place:
        totals = Totals()
        for _ in rows(paths, known, choices, totals, Progress(len(paths), "read")):
            pass
        if not totals.rows:
            raise BadOutcome(f"no rows to export from {len(paths)} logs: {_why_none(totals)}")
        again = Totals()

        def second_pass() -> Iterator[Any]:
            yield from rows(paths, known, choices, again, Progress(len(paths), "written"))

        WRITERS[to](place, second_pass(), totals, chosen)
        if msgspec.json.encode(again) != msgspec.json.encode(totals):
            raise LogError("the logs changed while they were exported; export again when their executions have ended")
    if as_json:
        say_json(msgspec.to_builtins(totals) | {"out": out, "to": to} | chosen)
    else:
        for line in _summary(totals, out, to, scored=known is not None):
            say(line)
    return 0


def _why_none(totals: Totals) -> str:
    if totals.excluded:
        return "; ".join(_grouped(totals.excluded))
    return "nothing in them is trainable (`gyre-traj inspect` says why)"


def _summary(totals: Totals, out: str, to: str, *, scored: bool) -> Iterator[str]:
    yield f"{out} ({to}): {totals.rows:,} rows of {totals.executions:,} executions"
    yield f"  {totals.targets:,} targets in {totals.tokens:,} tokens; the loss is divided by {totals.units:g}"
    if not scored:
        yield "  no outcomes were given: every advantage is 1, no row has a reward"
    if totals.placeholders:
        yield f"  {len(totals.placeholders)} placeholders, nothing to score: counted, without rows"
    if totals.without_rows:
        yield f"  {len(totals.without_rows)} executions with nothing to train on: counted, without rows"
    if to == "slime" and totals.units != totals.executions:
        yield f"  slime divides by its rollouts, which are the {totals.executions:,} executions with rows"
    if totals.without_log:
        yield f"  {len(totals.without_log)} scored executions have no log here: in the baseline alone"
    for line in _grouped(totals.excluded):
        yield f"  excluded: {line}"
    if totals.left_out:
        yield "  left out, trainable tokens: " + ", ".join(f"{role} {n:,}" for role, n in totals.left_out.items())


def _grouped(excluded: dict[str, str]) -> Iterator[str]:
    """Reasons, each with the executions it excluded."""
    reasons: dict[str, list[str]] = {}
    for execution, reason in excluded.items():
        reasons.setdefault(reason, []).append(execution)
    for reason, names in reasons.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"{', '.join(names[:_NAMED])}{more}: {reason}"
