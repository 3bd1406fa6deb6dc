"""One self-contained HTML page of a run: live, fed by the scheduler that serves it, or a report on a disk.

The sources are `data/face/`: page.html with page.css and the scripts inlined. What the run says is data, never markup:
it travels as JSON in which no tag can end, and a content security policy allows no script or style but these, and no
connection but, when live, to where the page came from.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from functools import lru_cache
from importlib import resources
from pathlib import Path

import msgspec

from gyre_sched.errors import SchedError
from gyre_sched.face.picture import Picture

_SCRIPTS = ("base", "timeline", "tables", "main")
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}  # in JSON these occur within strings only


def render(picture: Picture, *, live: bool) -> str:
    """The page as HTML. live: it asks `events` beside it for newer pictures."""
    css, script, template = _sources()
    connect = "connect-src 'self'; " if live else ""
    policy = (
        f"default-src 'none'; {connect}script-src '{_digest(script)}'; style-src '{_digest(css)}'; "
        "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )
    data = {**msgspec.to_builtins(picture, str_keys=True), "live": live}
    parts = {
        "policy": policy,
        "css": css,
        "script": script,
        "data": msgspec.json.encode(data).decode().translate(_UNSAFE),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def write_report(picture: Picture, out: Path) -> int:
    """Write the page as a report to `out`, whole or not at all; returns its bytes. Raises `SchedError`."""
    html = render(picture, live=False).encode()
    half = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        half.write_bytes(html)
        half.replace(out)
    except OSError as e:
        half.unlink(missing_ok=True)
        raise SchedError(
            f"the report {str(out)!r} cannot be written: {e.strerror}; name a file in a folder you can write to"
        ) from e
    return len(html)


@lru_cache(maxsize=1)
def _sources() -> tuple[str, str, str]:
    source = resources.files("gyre_sched") / "data" / "face"
    css = (source / "page.css").read_text(encoding="utf-8")
    scripts = "\n".join((source / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    return css, f'"use strict";\n(() => {{\n{scripts}\n}})();\n', (source / "page.html").read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
