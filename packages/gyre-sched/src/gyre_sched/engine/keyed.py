"""Start an SGLang server that asks for a token, which comes in the environment: a command line is anybody's to read.

    python keyed.py PROGRAM [ARGUMENT …]        PROGRAM: the name of a module, or a .py file

Only the standard library is imported: the server is what this process becomes.
"""

import os
import runpy
import sys

KEY = "GYRE_ENGINE_KEY"


def main() -> None:
    """Run PROGRAM as if it were the command, with --api-key; its children inherit no token."""
    program = sys.argv[1]
    sys.argv = [program, *sys.argv[2:], "--api-key", os.environ.pop(KEY)]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
