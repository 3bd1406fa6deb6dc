"""`gyre top`: a run on a terminal, live or as it ended. Needs the extra `[face]`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, RichLog, Static

from gyre_sched.errors import SchedError
from gyre_sched.face import terminal
from gyre_sched.face.follow import Follower
from gyre_sched.face.picture import Picture

_STEPS = (
    ("step", "step"),
    ("mean_score", "score"),
    ("executions", "executions"),
    ("excluded", "excluded"),
    ("trajectories", "trajectories"),
    ("tokens_unique", "unique"),
    ("staleness", "stale"),
    ("loss", "loss"),
    ("seconds", "seconds"),
)
_MARGIN = 10  # columns before a strip


def watch(run_dir: Path, *, period: float = 1.0) -> None:
    """Show the run until its user quits. Raises `JournalError` (no run directory), `SchedError` (no terminal)."""
    app = Top(run_dir, period=period)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):  # without keys it could not be quit
        raise SchedError(
            "`top` needs a terminal, got a pipe or a file; use `gyre-sched report` for a file, `web` for a browser"
        )
    app.run()


class Top(App[None]):
    """Shows `Follower`'s picture every `period` seconds."""

    TITLE = "gyre top"
    CSS = """
    #head { height: 4; padding: 0 1; }
    #time { height: auto; max-height: 40%; padding: 0 1; overflow-y: auto; }
    #rest { height: 1fr; }
    #left { width: 3fr; }
    #cells { height: auto; max-height: 50%; }
    #steps { height: 1fr; }
    #notes { width: 2fr; border-left: solid $surface-lighten-2; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("f", "failures", "Failures only"),
        ("p", "pause", "Pause"),
    ]

    def __init__(self, run_dir: Path, *, period: float = 1.0) -> None:
        """Raises `JournalError` when `run_dir` is no run directory."""
        super().__init__()
        self._follower = Follower(run_dir)
        self._period = period
        self._picture: Picture | None = None
        self._paused = self._only_failures = False
        self._looking = asyncio.Lock()

    def compose(self) -> ComposeResult:
        """The widgets."""
        yield Static(id="head")
        yield Static(id="time")
        with Horizontal(id="rest"):
            with Vertical(id="left"):
                yield DataTable(id="cells", cursor_type="none")
                yield DataTable(id="steps", cursor_type="none")
            yield RichLog(id="notes", wrap=True, min_width=24)
        yield Footer()

    async def on_mount(self) -> None:
        """Look at once, then periodically."""
        cells, steps = self.query_one("#cells", DataTable), self.query_one("#steps", DataTable)
        cells.add_columns("cell", "role", "for", "engine", "capacity", "version", "rollout", "training")
        steps.add_columns(*(title for _, title in _STEPS))
        await self._look()
        self.set_interval(self._period, self._look)

    def on_resize(self) -> None:
        """Strips are as wide as the terminal."""
        self._draw()

    async def _look(self) -> None:
        if self._paused or self._looking.locked():
            return
        async with self._looking:
            try:
                self._picture = await asyncio.to_thread(self._follower.look)
            except SchedError as e:
                self.notify(str(e), severity="error")
                return
        self._draw()

    def action_failures(self) -> None:
        """Show failures only, or all events again."""
        self._only_failures = not self._only_failures
        self._draw()

    def action_pause(self) -> None:
        """Stop looking, or go on."""
        self._paused = not self._paused
        self.notify("paused" if self._paused else "going on")

    def _draw(self) -> None:
        p = self._picture
        if p is None:
            return
        self.query_one("#head", Static).update(terminal.headline(p).append("\n").append_text(terminal.figures(p)))
        self._draw_time(p)
        self._draw_cells(p)
        self._draw_steps(p)
        notes = self.query_one("#notes", RichLog)
        notes.clear()
        for note in p.notes:
            if note.failure or not self._only_failures:
                notes.write(terminal.note_line(note, p))

    def _draw_time(self, p: Picture) -> None:
        box = self.query_one("#time", Static)
        width = max(0, self.size.width - _MARGIN - 3)
        text = terminal.levels(p, width)
        lines = Text("water".rjust(_MARGIN - 1) + " ").append_text(text)
        for cell in p.cells:
            name = "core 0" if cell.cell == 0 else f"cell {cell.cell}"
            lines.append("\n" + name.rjust(_MARGIN - 1) + " ").append_text(terminal.strip(cell, p, width))
        box.update(lines)

    def _draw_cells(self, p: Picture) -> None:
        table = self.query_one("#cells", DataTable)
        table.clear()
        for cell in p.cells:
            rollout, training = terminal.shares(p, cell)
            role = Text(cell.role, terminal.STYLES.get(cell.role, terminal.BETWEEN))
            since = terminal.elapsed(p.at - cell.since)
            table.add_row(
                str(cell.cell), role, since, cell.engine, str(cell.capacity), str(cell.version), rollout, training
            )

    def _draw_steps(self, p: Picture) -> None:
        table = self.query_one("#steps", DataTable)
        table.clear()
        for step in reversed(p.steps):
            values = [step.get(key) for key, _ in _STEPS]
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else "-" if v is None else str(v) for v in values))
