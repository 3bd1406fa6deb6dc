"""A token-exact LLM proxy and execution runner for agent harnesses.

The proxy is a process (`gyre-agent-proxy serve`); what other code uses of it is small and listed in `__all__`.
"""

from gyre_agent_proxy.config import ModelConfig, ProxyConfig
from gyre_agent_proxy.errors import ProxyError
from gyre_agent_proxy.keys import execution_of, load_secret, make_key

__version__ = "0.1.0"

__all__ = ["ModelConfig", "ProxyConfig", "ProxyError", "execution_of", "load_secret", "make_key"]
