"""Keep uv.lock free of index addresses.

A lock file names the index each artifact came from. Gyre's lock is committed with versions only, so that the same file
works behind any mirror; uv resolves it again to exactly these versions on the first sync.

    python tools/lock.py clean < uv.lock     what git stores (the filter, see CONTRIBUTING.md)
    python tools/lock.py strip               rewrite uv.lock in place
    python tools/lock.py check               exit 1 if uv.lock still holds an address
"""

import re
import sys
from pathlib import Path

_DROPPED = (
    r"^sdist = .*\n",
    r"^wheels = \[\n(?:    .*\n)*\]\n",
    r"^\[package\.metadata(?:\.[\w-]+)?\]\n(?:.+\n)+\n?",
)


def strip(lock: str) -> str:
    """Return `lock` without artifact addresses and without the metadata uv derives again."""
    for pattern in _DROPPED:
        lock = re.sub(pattern, "", lock, flags=re.MULTILINE)
    return re.sub(r'registry = "[^"]*"', 'registry = "."', lock)


def addresses(lock: str) -> list[str]:
    """Return the lines of `lock` that name an address."""
    return [line for line in lock.splitlines() if "://" in line]


def main(argv: list[str]) -> int:
    path = Path(__file__).resolve().parent.parent / "uv.lock"
    match argv:
        case ["clean"]:
            sys.stdout.write(strip(sys.stdin.read()))
            return 0
        case ["strip"]:
            path.write_text(strip(path.read_text()))
            return 0
        case ["check"]:
            found = addresses(path.read_text())
            for line in found:
                print(f"uv.lock names an address: {line.strip()!r}; run `python tools/lock.py strip`", file=sys.stderr)
            return 1 if found else 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
