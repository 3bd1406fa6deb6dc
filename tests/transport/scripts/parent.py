"""A parent to be killed: starts one child and prints its pid.

parent.py own LOG HOW                 a child of ours
parent.py guarded LOG PROGRAM …       a foreign program under the guard
"""

import asyncio
import json
import sys
from pathlib import Path

from gyre_transport.process import Child


async def main(kind: str, log: str, *argv: str) -> None:
    if kind == "own":
        program = [sys.executable, str(Path(__file__).with_name("child.py")), *argv]
        child = await Child.start("child", program, log=Path(log), ready_within=60)
    else:
        child = await Child.start("program", argv, log=Path(log), ready_within=None, guarded=True)
    print(json.dumps(child.pid), flush=True)
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
