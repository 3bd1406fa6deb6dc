"""`gyre-transport`: what the transport can do on this machine."""

from __future__ import annotations

import argparse
import json
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gyre-transport", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="try every way to read another process's memory; exit code 1 if a needed one does not work",
    )
    doctor.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    arguments = parser.parse_args(argv)
    return _doctor(as_json=arguments.json)


def _doctor(*, as_json: bool) -> int:
    import msgspec

    from gyre_transport.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps(msgspec.to_builtins(findings), indent=2))
    else:
        print(f"{'backend':<9}{'works':<7}{'for':<54}detail")
        for f in findings:
            print(f"{f.backend:<9}{'yes' if f.works else 'no':<7}{f.use:<54}{f.detail}")
    return 1 if any(f.needed and not f.works for f in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
