"""What is simulated: the work, the machines, what a role switch costs. Read from TOML, a table a struct.

The defaults make 500 runs of a small agent into long ones (30 times the tokens and the tool time: about 750,000 tokens
and two hours each) on eight cells that train a batch in 40 % of the time in which they sample it. With 32 requests a
decode step takes about two and a half times as long as with one, as it does with large mixture-of-experts models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from gyre_sched.errors import ScenarioError


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[workload]: which executions there are."""

    trace: str = ""  # file or folder (`gyre_sched.simulate.trace`); empty: the shipped trace
    scale: float | None = None  # of tokens and tool time, a call standing for so many; None: 30 for the shipped trace
    tail: float = 1.0  # stretches lengths around their mean: each is taken to this power
    alike: float = 0.5  # correlation of an execution's length with its task's; 1: a group's members are one run
    groups: int = 32  # of a batch
    group_size: int = 8
    cap: Literal["none", "work", "wall"] = "none"  # work: of the time it takes alone; wall: of the time it takes
    cap_hours: float = 4.0
    score_seconds: float = 20.0  # from an execution's end until the feed has it
    order: Literal["group", "spread"] = "group"  # spread: members of a group do not start together
    merge: int = 2  # consecutive calls simulated as one

    @property
    def executions(self) -> int:
        """Of one batch."""
        return self.groups * self.group_size


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[fleet]: cells and how fast an engine is. A decode step takes step_ms + step_ms_request · requests
    + step_ms_kilotoken · their context in thousands of tokens."""

    cells: int = 8
    standalone: int = 0  # engines that never train
    slots: int = 32  # executions an engine hosts
    context: int = 131_072  # tokens a call may have; an agent compacts beyond
    kv_tokens: int = 6_000_000  # an engine's cache; requests wait, and idle contexts are dropped, when it is full
    prefill: float = 20_000.0  # tokens a second
    step_ms: float = 12.0
    step_ms_request: float = 0.6
    step_ms_kilotoken: float = 0.002

    def step(self, requests: float, context: float) -> float:
        """Seconds a decode step takes, a token for each of `requests` with `context` tokens together."""
        return 1e-3 * (
            self.step_ms + self.step_ms_request * requests + self.step_ms_kilotoken * min(context, self.kv_tokens) / 1e3
        )


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[training]: how fast a cell trains."""

    rate: float | None = None  # tokens a second and cell; None: such that …
    share: float = 0.4  # … all cells train a batch in this share of the time in which they sample it
    micro_step: int = 500_000  # tokens
    optimizer: float = 30.0  # seconds from the last micro-step to new weights: hand-over, step
    publish: float = 5.0  # until others may read them
    join: float = 5.0  # a satellite's pull of the weights, once a batch
    streaming: bool = True  # a batch may be begun before all its groups are there
    membership: Literal["arrival", "dispatch"] = (
        "arrival"  # a batch is what is complete first, or what was sent together
    )


class Switch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[switch]: what a role switch costs."""

    drain: float = 1.0  # seconds until every proxy has moved its requests
    enter: float = 8.52  # engine released, trainer entered
    leave: float = 3.46  # trainer left, engine resumed
    refresh: float = 15.0  # new weights into an engine
    move: Literal["kv", "recompute"] = "kv"  # a moved request's context: read from the source, or computed again
    move_seconds: float = 0.2  # kv: for a request, and …
    move_rate: float = 500_000.0  # … tokens a second


class Length(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[length]: how much is simulated and what of it is measured."""

    steps: int = 12  # measured
    warmup: int = 4  # steps before; the first bursts are not like the others
    seed: int = 0
    max_days: float = 365.0  # of simulated time, after which a simulation that does not end is given up


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a simulation depends on but the schedule. `ScenarioError` when it makes no sense."""

    workload: Workload = Workload()
    fleet: Fleet = Fleet()
    training: Training = Training()
    switch: Switch = Switch()
    length: Length = Length()

    @property
    def scale(self) -> float:
        """Of tokens and tool time."""
        w = self.workload
        return w.scale if w.scale is not None else (1.0 if w.trace else 30.0)

    def __post_init__(self) -> None:
        for table in (self.workload, self.fleet, self.training, self.switch, self.length):
            for field in msgspec.structs.fields(table):
                value = getattr(table, field.name)
                if not isinstance(value, int | float):
                    continue
                if field.name in _POSITIVE:
                    if not value > 0:
                        raise ScenarioError(f"{field.name} must be more than 0, got {value!r}")
                elif not value >= _LEAST.get(field.name, 0):
                    raise ScenarioError(f"{field.name} must be at least {_LEAST.get(field.name, 0)}, got {value!r}")
        if self.workload.alike > 1:
            raise ScenarioError(f"alike must be at most 1, got {self.workload.alike!r}")


_LEAST = dict.fromkeys(("cells", "slots", "groups", "group_size", "merge", "steps", "context", "micro_step"), 1)
_POSITIVE = frozenset(
    ("scale", "tail", "cap_hours", "kv_tokens", "prefill", "step_ms", "rate", "share", "move_rate", "max_days")
)


def load_scenario(path: Path | None, overrides: list[str] | tuple[str, ...] = ()) -> Scenario:
    """A TOML file (None: the defaults) with `table.key=value` overrides. Raises `ConfigError` or `ScenarioError`."""
    from gyre_transport.config import load, only, section

    names = {field.name: field.type for field in msgspec.structs.fields(Scenario)}
    data = load(path, overrides)
    only(data, set(names))
    return Scenario(**{name: section(data, name, kind) for name, kind in names.items()})
