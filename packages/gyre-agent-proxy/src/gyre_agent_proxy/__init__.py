"""A token-exact LLM proxy and execution runner for agent harnesses.

The proxy is a process (`gyre-agent-proxy serve`); what other code uses of it is small and listed in `__all__`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_agent_proxy.config import ModelConfig, ProxyConfig
    from gyre_agent_proxy.errors import ProxyError
    from gyre_agent_proxy.keys import execution_of, load_secret, make_key

__version__ = "0.1.0"

__all__ = ["ModelConfig", "ProxyConfig", "ProxyError", "execution_of", "load_secret", "make_key"]

_HOMES = {
    "ModelConfig": "config",
    "ProxyConfig": "config",
    "ProxyError": "errors",
    "execution_of": "keys",
    "load_secret": "keys",
    "make_key": "keys",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line answers --help without any of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
