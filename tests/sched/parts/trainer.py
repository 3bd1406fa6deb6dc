"""A trainer that trains nothing: it becomes what its agent orders and says so.

Started as `trainer.py --config F --cell I`. When it is told to stop it writes `stopped-<cell>` beside the config.
The environment variable TRAINER_CODE makes it end with that exit code before it reports.
"""

import argparse
import os
import sys
from pathlib import Path

from gyre_sched import protocol as p
from gyre_transport.bus import BlockingClient
from gyre_transport.process import follow_parent
from gyre_transport.run import Context


def main() -> int:
    follow_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--cell", type=int)
    args = parser.parse_args()
    if code := os.environ.get("TRAINER_CODE"):
        print("this trainer ends early")
        return int(code)
    context, state = Context(args.config), "idle"
    with BlockingClient(context.bus.address(f"agent-{args.cell}"), p.AgentReply) as agent:
        while state != "stop":
            wait = 0.05 if state == "training" else 2.0
            report = p.TrainerReport(cell=args.cell, state=state, wait=wait, instance=os.environ["GYRE_TRAINER"])
            state = agent.call(report, deadline=30).want
    (args.config.parent / f"stopped-{args.cell}").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
