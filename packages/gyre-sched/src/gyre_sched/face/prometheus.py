"""A picture as Prometheus metrics. Needs the extra `[face]`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gyre_sched.face.picture import Picture

ROLES = ("starting", "rollout", "draining", "entering", "training", "leaving", "refreshing", "failed", "fenced")


class _Shown(Collector):
    def __init__(self, picture: Picture) -> None:
        self._p = picture

    def collect(self) -> Iterator[Metric]:
        p = self._p
        for name, help_text, value in (
            ("gyre_water_level", "Executions dispatched and not terminated (w)", p.water),
            ("gyre_capacity", "Executions the routable engines may host (C_R)", p.capacity),
            ("gyre_queued_executions", "Executions dispatched and not started", p.dispatched - p.started),
            ("gyre_running_executions", "Executions started and not terminated", p.started - p.terminated),
            ("gyre_weights_version", "Version of the published weights", p.version),
            ("gyre_halted", "1 when nothing can be dispatched any more", int(p.halted is not None)),
            ("gyre_last_event_timestamp_seconds", "Unix time of the scheduler's last event", p.at),
        ):
            yield GaugeMetricFamily(name, help_text, value=value)
        for name, help_text, count in (
            ("gyre_executions_dispatched", "Executions dispatched", p.dispatched),
            ("gyre_executions_terminated", "Executions terminated", p.terminated),
            ("gyre_calls_moved", "Calls continued on another engine because a cell left", p.moved),
        ):
            yield CounterMetricFamily(name, help_text, value=count)
        yield from self._feed()
        yield from self._cells()
        failures = CounterMetricFamily("gyre_failures", "Failures the scheduler saw", labels=["kind"])
        for kind, count in p.failures.items():
            failures.add_metric([kind], count)
        yield failures
        yield from self._steps()
        for prefix, counters in (("gyre_proxy", p.proxy), ("gyre_runner", p.runner)):
            for key, value in counters.items():
                if isinstance(value, int | float):
                    yield GaugeMetricFamily(f"{prefix}_{key}", f"{key} of metrics/{prefix[5:]}.json", value=value)

    def _feed(self) -> Iterator[Metric]:
        for key in ("waiting", "micro_steps_left", "batches_ready", "batches_closed", "executions_trained"):
            value = self._p.backlog.get(key)
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"gyre_feed_{key}", f"{key} of the feed's backlog", value=value)

    def _cells(self) -> Iterator[Metric]:
        role = GaugeMetricFamily("gyre_cell_role", "1 for the role the cell is in", labels=["cell", "role"])
        version = GaugeMetricFamily("gyre_cell_version", "Weights the cell's engine serves", labels=["cell"])
        spent = CounterMetricFamily("gyre_cell_role_seconds", "Seconds spent in a role", labels=["cell", "role"])
        for cell in self._p.cells:
            name = str(cell.cell)
            for known in ROLES:
                role.add_metric([name, known], float(cell.role == known))
            version.add_metric([name], cell.version)
            for known, seconds in self._p.seconds[cell.cell].items():
                spent.add_metric([name, known], seconds)
        yield from (role, version, spent)

    def _steps(self) -> Iterator[Metric]:
        if not self._p.steps:
            return
        for key, value in self._p.steps[-1].items():
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"gyre_step_{key}", f"{key} of the last optimizer step", value=value)


def exposition(picture: Picture) -> bytes:
    """The text format that Prometheus scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Shown(picture))
    return generate_latest(registry)
