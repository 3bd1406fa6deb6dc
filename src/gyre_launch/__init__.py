"""The launcher: one command for a whole elastic RL run."""

__version__ = "0.1.0"
