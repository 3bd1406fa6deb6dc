"""Set resource limits, then become another program.

    python -I -S limits.py CPU_SECONDS MEMORY_BYTES PROGRAM [ARGUMENT …]

Run by path beside every verifier: only the standard library is imported.
"""

import os
import resource
import sys


def main(argv: list[str]) -> None:
    """Limit CPU time and address space of each process below, forbid core files, replace this process by `argv[2:]`."""
    cpu, memory, program = int(argv[0]), int(argv[1]), argv[2:]
    for limit, value in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    try:
        os.execvp(program[0], program)  # noqa: S606
    except OSError as e:
        print(f"cannot start {program[0]!r}: {e.strerror}", file=sys.stderr)  # noqa: T201
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
