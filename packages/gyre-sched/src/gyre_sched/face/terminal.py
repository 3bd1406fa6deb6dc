"""A picture as text for a terminal: pure functions from the picture and a width in columns to lines with colours."""

from __future__ import annotations

from rich.text import Text

from gyre_sched.face.chronicle import Cell, Level, Note
from gyre_sched.face.picture import Picture

STYLES = {
    "rollout": "#5b8ceb",
    "training": "#e8964a",
    "failed": "red",
    "fenced": "red",
    "starting": "grey50",
}
BETWEEN = "#a08cc8"  # draining, entering, leaving, refreshing
_LETTERS = {"rollout": "R", "training": "T", "failed": "x", "fenced": "x", "starting": "·"}  # for eyes without colours
_BLOCKS = " ▁▂▃▄▅▆▇█"


def elapsed(seconds: float) -> str:
    """`seconds` as [h:]mm:ss."""
    s = max(0, int(seconds))
    rest = f"{s // 60 % 60:02d}:{s % 60:02d}"
    return f"{s // 3600}:{rest}" if s >= 3600 else rest


def headline(p: Picture) -> Text:
    """Name, state and how long it has gone on."""
    state, style = ("ended", "grey62") if p.ended else ("running", "green")
    if p.halted:
        state, style = f"halted: {p.halted}", "bold red"
    if p.damage:
        state, style = f"{state}; the journal is damaged {p.damage}", "bold red"
    told = elapsed(p.at - p.began) if p.began is not None else "00:00"
    return Text.assemble((p.name, "bold"), "  ", (state, style), f"  {told}")


def figures(p: Picture) -> Text:
    """The numbers of this moment."""
    last = p.steps[-1] if p.steps else {}
    of = f"/{p.steps_total}" if p.steps_total else ""
    score = last.get("mean_score")
    failed = p.proxy.get("calls_failed", 0)
    pairs: list[tuple[str, str, str]] = [
        ("step", f"{last.get('step', 0)}{of}", ""),
        ("burst", "-" if p.burst is None else str(p.burst), ""),
        ("version", str(p.version), ""),
        ("water", f"{p.water}/{p.capacity}", ""),
        ("queued", str(p.dispatched - p.started), ""),
        ("running", str(p.started - p.terminated), ""),
        ("at feed", str(p.backlog.get("waiting", 0)), ""),
        ("micro-steps", str(p.backlog.get("micro_steps_left", 0)), ""),
        ("score", f"{score:.3f}" if isinstance(score, float) else "-", ""),
        ("calls", str(p.proxy.get("calls", 0)), ""),
        ("moved", str(p.proxy.get("calls_moved", p.moved)), ""),
        ("failed", str(failed), "red" if failed else ""),
        ("failures", str(sum(p.failures.values())), "red" if p.failures else ""),
    ]
    text = Text()
    for title, value, style in pairs:
        text.append(f"{title} ", "grey62").append(value, f"bold {style}".strip()).append("  ")
    return text


def levels(p: Picture, width: int) -> Text:
    """The water level over the run as blocks, the highest of each column; full height is the highest capacity."""
    if width < 1 or p.began is None or not p.levels:
        return Text()
    most = max(max(level.water, level.capacity) for level in p.levels) or 1
    text = Text()
    for water, capacity in _columns(p.levels, p.began, max(p.at, p.began + 1e-9), width):
        block = _BLOCKS[min(8, -(-water * 8 // most))]
        text.append(block, "cyan" if water <= capacity else "yellow")
    return text


def _columns(rows: list[Level], began: float, ended: float, width: int) -> list[tuple[int, int]]:
    """The highest water and the capacity with it, of each of `width` equal stretches of time."""
    made: list[tuple[int, int]] = []
    current, i = (0, 0), 0
    for column in range(width):
        until = began + (ended - began) * (column + 1) / width
        best = current
        while i < len(rows) and rows[i].at <= until:
            current = (rows[i].water, rows[i].capacity)
            best = max(best, current)
            i += 1
        made.append(best)
    return made


def strip(cell: Cell, p: Picture, width: int) -> Text:
    """A cell's roles over the run, one letter a column: the role it ended the column in."""
    if width < 1 or p.began is None:
        return Text()
    length = max(p.at - p.began, 1e-9)
    text, i = Text(), 0
    for column in range(width):
        until = p.began + length * (column + 1) / width
        while i + 1 < len(cell.spans) and cell.spans[i + 1].began <= until:
            i += 1
        role = cell.spans[i].role if cell.spans else "starting"
        style = STYLES.get(role, BETWEEN)
        text.append(_LETTERS.get(role, "~"), f"{style} reverse" if role in ("rollout", "training") else style)
    return text


def shares(p: Picture, cell: Cell) -> tuple[str, str]:
    """Percent of its time the cell was in rollout and in training."""
    spent = p.seconds.get(cell.cell, {})
    total = sum(spent.values())
    if not total:
        return "-", "-"
    return f"{spent.get('rollout', 0.0) / total:.0%}", f"{spent.get('training', 0.0) / total:.0%}"


def note_line(note: Note, p: Picture) -> Text:
    """One event."""
    where = "" if note.cell is None else f"cell {note.cell}"
    line = f"{elapsed(note.at - (p.began or note.at)):>8}  {where:<8} {note.kind.replace('_', ' ')}"
    return Text(f"{line}: {note.text}" if note.text else line, style="red" if note.failure else "")
