"""Typed messages over ZeroMQ and one-sided reads of registered memory for RL systems."""

__version__ = "0.1.0"
