"""A token-exact LLM proxy and execution runner for agent harnesses."""

__version__ = "0.1.0"
