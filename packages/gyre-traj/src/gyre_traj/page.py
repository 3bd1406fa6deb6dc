"""One self-contained HTML page of an execution's tree: open it from disk, it asks the network for nothing.

The sources are `data/page/`: page.html with page.css and the scripts inlined. What the log holds is data, never markup:
it travels as JSON in which no tag can end, the scripts write it as text only, and a content security policy allows no
script or style but these and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from importlib import resources
from pathlib import Path

import msgspec

from gyre_traj.errors import LogError
from gyre_traj.log import Log
from gyre_traj.page_data import PageData, page_data
from gyre_traj.text import Decoder

_SCRIPTS = ("base", "tree", "tree_input", "timeline", "passage", "curve", "detail", "transcript", "lists", "main")
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}  # in JSON these occur within strings only


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    path: str
    size: int  # bytes
    calls: int
    bars: int  # nodes drawn
    limit: int  # tokens of a prompt or output shown whole
    cut: int  # prompts and outputs that are longer: cut in the middle


def write_page(
    log: Log, out: str | Path, *, tokenizer: str | Path | None = None, j_max: int | None = 5, seed: int = 0
) -> Page:
    """Write the page of a log's execution to `out`, whole or not at all.

    `tokenizer`: a Hugging Face folder or a tokenizer.json, to show text (needs `gyre-traj[text]`); without it ids are
    shown. `j_max` and `seed` say which trajectories a selection would draw. Raises `TrajError`: the log has no header,
    a record is broken, the tokenizer cannot be read, the page cannot be written.
    """
    decoder = Decoder(tokenizer) if tokenizer is not None else None
    data = page_data(log, decoder=decoder, j_max=j_max, seed=seed)
    html = render_page(data).encode()
    path = Path(out)
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        half.write_bytes(html)
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        what = f"page {str(out)!r} cannot be written: {error.strerror}; name a file in a folder you can write to"
        raise LogError(what) from error
    return Page(
        path=str(path), size=len(html), calls=len(data.calls), bars=len(data.bars), limit=data.limit, cut=data.cut
    )


def render_page(data: PageData) -> str:
    """Return the page."""
    source = resources.files("gyre_traj") / "data" / "page"
    css = (source / "page.css").read_text(encoding="utf-8")
    scripts = "\n".join((source / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{scripts}\n}})();\n'
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(css)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "css": css,
        "script": script,
        "data": msgspec.json.encode(data).decode().translate(_UNSAFE),
    }
    template = (source / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
