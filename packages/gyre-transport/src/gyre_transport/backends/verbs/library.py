"""pyverbs, imported when a read or an owner first needs it, and what is said when it cannot be.

pyverbs is bound to the rdma-core it was built beside: its modules ask libibverbs for a private version,
IBVERBS_PRIVATE_n.

    n     rdma-core        pyverbs
    34    34 to 56         56.0rc5
    59    59               59.0
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gyre_transport.errors import Unreachable

_MATCHES = {34: ("34 to 56", "56.0rc5"), 59: ("59", "59.0")}
_BUILD = f"{__package__}.build"
_PRIVATE = re.compile(rb"IBVERBS_PRIVATE_(\d+)")
_MODULES = ("device", "pd", "mr", "cq", "qp", "wr", "addr", "enums", "fork", "pyverbs_error")


def load() -> Any:
    """The modules of pyverbs as attributes. Raises `Unreachable` with the remedy when it cannot be imported."""
    try:
        return _load()
    except ImportError as e:
        raise Unreachable(explain(str(e), system_abi())) from e


@lru_cache(maxsize=1)
def _load() -> Any:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES}
    finally:  # pyverbs configures the root logger; that is the program's to do
        for handler in [h for h in root.handlers if h not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)
    library = SimpleNamespace(**modules)
    if library.fork.is_fork_initialized() == library.enums.IBV_FORK_DISABLED:  # a kernel before 5.12
        library.fork.fork_init()
    return library


def matching() -> str:
    """The version of pyverbs that belongs to the installed rdma-core. Raises `Unreachable` with the remedy."""
    here = system_abi()
    if here not in _MATCHES:
        raise Unreachable(explain("libibverbs.so.1 is not there", here) if here is None else _remedy(here))
    return _MATCHES[here][1]


def explain(error: str, here: int | None) -> str:
    """What an ImportError of pyverbs means. here: private version of this machine's libibverbs; None: there is none."""
    if here is None:
        return f"rdma-core is missing ({error}); install libibverbs, librdmacm and the provider of your device"
    wanted = _PRIVATE.search(error.encode())
    if wanted is None:
        return f"pyverbs cannot be imported ({error}); {_remedy(here)}"
    asks = int(wanted[1])
    versions, _ = _MATCHES.get(asks, (f"of the private version {asks}", ""))
    return f"pyverbs was built for rdma-core {versions}, another one is installed; {_remedy(here)}"


def _remedy(here: int) -> str:
    if here not in _MATCHES:
        return f"build pyverbs from the sources of the installed rdma-core (private version {here}) and install that"
    versions, pyverbs = _MATCHES[here]
    return f"to rdma-core {versions}, as here, belongs pyverbs {pyverbs}: `python -m {_BUILD}` builds and installs it"


@lru_cache(maxsize=1)
def system_abi() -> int | None:
    """The private version of the installed libibverbs; None when there is none."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return None
    maps = Path("/proc/self/maps").read_text()
    path = re.search(r"\S*/libibverbs\.so\S*", maps)
    found = _PRIVATE.search(Path(path[0]).read_bytes()) if path else None
    return int(found[1]) if found else None
