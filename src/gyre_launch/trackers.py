"""Where a run's steps are shown besides `metrics/steps.jsonl`: TensorBoard by default, wandb and trackio as extras.

    trackers = Trackers(config, run_dir, name, say)
    trackers.step({"step": 1, "mean_score": .5, "micro_steps": {"0": 3}})    step/mean_score, step/micro_steps/0

A tracker is never a reason for a run to end: one that fails is told of once and gets nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from gyre_launch.errors import LaunchError

Kind = Literal["tensorboard", "wandb", "trackio"]


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[metrics]: `metrics/steps.jsonl` is always written; these get the same numbers."""

    trackers: tuple[Kind, ...] = ("tensorboard",)
    project: str = "gyre"  # of wandb and trackio


class Tracker(Protocol):
    """Something that shows numbers by step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of one step."""

    def close(self) -> None:
        """Write what is not written yet."""


class TensorBoard:
    """Event files in RUN/metrics/tensorboard."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=5)

    def log(self, step: int, values: dict[str, float]) -> None:
        """As `Tracker.log`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """As `Tracker.close`."""
        self._writer.close()


class Hosted:
    """wandb, or trackio, which has the same interface: a run of `project`, its files under RUN/metrics."""

    def __init__(self, kind: Literal["wandb", "trackio"], project: str, name: str, folder: Path) -> None:
        """Raises `LaunchError` when the package is not installed."""
        import importlib

        try:
            self._module = importlib.import_module(kind)
        except ImportError as e:
            raise LaunchError(
                f"metrics.trackers names {kind!r}, which is not installed: install gyre-launch[{kind}], or leave it out"
            ) from e
        where = {"dir": str(folder)} if kind == "wandb" else {}
        self._run = self._module.init(project=project, name=name, **where)

    def log(self, step: int, values: dict[str, float]) -> None:
        """As `Tracker.log`."""
        self._module.log(values, step=step)

    def close(self) -> None:
        """As `Tracker.close`."""
        self._module.finish()


class Trackers:
    """All trackers of a run."""

    def __init__(self, config: MetricsConfig, folder: Path, name: str, say: Callable[[str], None]) -> None:
        """folder: RUN/metrics. say: tells the operator of a tracker that failed. Raises nothing."""
        self._say = say
        self._open: dict[str, Tracker] = {}
        for kind in config.trackers:
            try:
                self._open[kind] = _make(kind, config.project, folder, name)
            except Exception as e:
                self._failed(kind, e)

    def step(self, record: dict[str, Any]) -> None:
        """Log one line of steps.jsonl."""
        values = dict(scalars(record))
        for kind, tracker in list(self._open.items()):
            try:
                tracker.log(int(record["step"]), values)
            except Exception as e:
                del self._open[kind]
                self._failed(kind, e)

    def close(self) -> None:
        """Close all."""
        while self._open:
            kind, tracker = self._open.popitem()
            try:
                tracker.close()
            except Exception as e:
                self._failed(kind, e)

    def _failed(self, kind: str, error: Exception) -> None:
        self._say(f"the tracker {kind} failed and gets nothing more: {type(error).__name__}: {error}")


def _make(kind: Kind, project: str, folder: Path, name: str) -> Tracker:
    if kind == "tensorboard":
        return TensorBoard(folder / "tensorboard")
    return Hosted(kind, project, name, folder)


def scalars(record: dict[str, Any], prefix: str = "step") -> Iterable[tuple[str, float]]:
    """The numbers of a step's record, those of its tables by path: `step/means/kl`."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}/{key}")
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
            yield f"{prefix}/{key}", float(value)
