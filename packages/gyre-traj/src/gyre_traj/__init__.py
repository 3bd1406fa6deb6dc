"""Exact call records, trajectory trees, bounded selection, fair weights and packed batches for agent RL."""

__version__ = "0.1.0"
