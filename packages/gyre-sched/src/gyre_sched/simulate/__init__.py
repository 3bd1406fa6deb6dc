"""What a schedule would cost: discrete events over traces of real agent runs, the scheduler's own policy in the loop.

from gyre_sched.simulate import Scenario, load_trace, run

for name in ("colocate", "elastic-2"):
    print(name, run(Scenario(), load_trace(), name).step_seconds)
"""

from gyre_sched.simulate.run import run
from gyre_sched.simulate.scenario import Scenario
from gyre_sched.simulate.schedules import SCHEDULES, Schedule
from gyre_sched.simulate.trace import Run, Turn, load_trace

__all__ = ["SCHEDULES", "Run", "Scenario", "Schedule", "Turn", "load_trace", "run"]
