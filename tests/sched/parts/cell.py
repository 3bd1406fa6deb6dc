"""A cell as a process: the real agent, over a scripted engine; it writes down the orders it obeys.

Started as `cell.py --config F --cell I`; obeyed orders are lines of `orders-<cell>` beside the config.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from gyre_sched import protocol as p
from gyre_sched.agent import CellAgent, serve
from gyre_sched.engine import launch
from gyre_transport.process import follow_parent
from gyre_transport.run import Context


def main() -> None:
    follow_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--cell", type=int)
    args = parser.parse_args()
    folder = args.config.parent
    argv = [sys.executable, str(Path(__file__).with_name("engine.py"))]
    launch.command = lambda c, m, port, cuda, kv=None: ([*argv, str(port), str(folder / "faults")], dict(os.environ))
    launch.check = lambda *_, **__: None
    handle = CellAgent.handle

    async def noted(self: CellAgent, request: p.AgentRequest) -> p.AgentReply:
        reply = await handle(self, request)
        if isinstance(request, p.EnterTraining | p.EnterRollout | p.Refresh):
            told = {"order": type(request).__name__, "term": request.term, "registration": request.registration}
            told |= {"pid": os.getpid(), "reply": type(reply).__name__}
            with (folder / f"orders-{args.cell}").open("a") as f:
                f.write(json.dumps(told) + "\n")
        return reply

    CellAgent.handle = noted
    asyncio.run(serve(Context(args.config), args.cell))


if __name__ == "__main__":
    main()
