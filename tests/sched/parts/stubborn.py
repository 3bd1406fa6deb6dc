"""A trainer that reports itself idle for ever, whatever it is ordered."""

import argparse
import time
from pathlib import Path

from gyre_sched import protocol as p
from gyre_transport.bus import BlockingClient
from gyre_transport.process import follow_parent
from gyre_transport.run import Context

follow_parent()
parser = argparse.ArgumentParser()
parser.add_argument("--config", type=Path)
parser.add_argument("--cell", type=int)
args = parser.parse_args()
with BlockingClient(Context(args.config).bus.address(f"agent-{args.cell}"), p.AgentReply) as agent:
    while True:
        agent.call(p.TrainerReport(cell=args.cell, state="idle"), deadline=30)
        time.sleep(0.05)
