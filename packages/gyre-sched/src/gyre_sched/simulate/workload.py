"""Which executions a run has: groups of one task each, their members alike but not the same, some of them capped."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from gyre_sched.simulate.engine import Job
from gyre_sched.simulate.scenario import Scenario
from gyre_sched.simulate.trace import Run, Turn


class Workload:
    """The executions of every batch, the same for every schedule.

    A task is a run of the trace. The members of its group are runs of the trace, too, whose lengths are correlated with
    the task's: ranks of length are normal scores, z = √a · z(task) + √(1 - a) · ε with a = `alike`. So lengths are
    distributed as in the trace whatever `alike` is.
    """

    def __init__(self, scenario: Scenario, runs: Sequence[Run]) -> None:
        self._scenario, self._work = scenario, scenario.workload
        self._mean = sum(r.seconds() for r in runs) / len(runs)
        self._runs = sorted(runs, key=lambda r: (r.seconds(), r.task))
        self._tasks = list(range(len(runs)))
        random.Random(scenario.length.seed).shuffle(self._tasks)  # noqa: S311
        self._made: dict[int, tuple[tuple[Turn, ...], bool]] = {}

    def batch(self, index: int) -> list[Job]:
        """The executions of batch `index` in the order planned; groups take the tasks in turn."""
        work, count, normal = self._work, len(self._runs), NormalDist()
        jobs = []
        for g in range(work.groups):
            number = index * work.groups + g
            task = self._tasks[number % count]
            score = normal.inv_cdf((task + 0.5) / count)
            rng = random.Random(f"{self._scenario.length.seed}-{number}")  # noqa: S311
            for e in range(work.group_size):
                z = math.sqrt(work.alike) * score + math.sqrt(1.0 - work.alike) * rng.gauss()
                turns, capped = self._of(min(count - 1, int(normal.cdf(z) * count)))
                job = Job(f"{number}-{e}", index, str(number), self._runs[task].task, turns)
                job.capped = capped
                jobs.append(job)
        if work.order == "spread":
            jobs.sort(key=lambda j: int(j.name.partition("-")[2]))
        return jobs

    def _of(self, run: int) -> tuple[tuple[Turn, ...], bool]:
        if run not in self._made:
            self._made[run] = self.turns(self._runs[run])
        return self._made[run]

    def turns(self, run: Run) -> tuple[tuple[Turn, ...], bool]:
        """`run` scaled, its calls merged, cut where a work cap ends it; and whether one does."""
        work, fleet = self._work, self._scenario.fleet
        scale = self._scenario.scale
        if work.tail != 1.0:
            scale *= (run.seconds() / self._mean) ** (work.tail - 1.0)
        merged: list[Turn] = []
        for i in range(0, len(run.turns), work.merge):
            part = run.turns[i : i + work.merge]
            merged.append(
                Turn(
                    round(sum(t.fresh for t in part) * scale),
                    max(1, round(sum(t.output for t in part) * scale)),
                    sum(t.pause for t in part) * scale,
                )
            )
        if work.cap != "work":
            return tuple(merged), False
        left, cut = work.cap_hours * 3600.0, []
        for t in merged:
            prefill, sample = t.fresh / fleet.prefill, t.output * fleet.step(1, 0)
            if prefill + sample >= left:
                share = max(0.0, left - prefill) / sample
                cut.append(Turn(t.fresh, max(1, round(t.output * share)), 0.0))
                return tuple(cut), True
            pause = min(t.pause, left - prefill - sample)
            cut.append(t._replace(pause=pause))
            left -= prefill + sample + pause
            if left <= 0:
                return tuple(cut), True
        return tuple(cut), False
