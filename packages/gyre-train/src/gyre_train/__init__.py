"""The feed and a Megatron-core replica per cell, core or satellite, for streaming RL batches."""

__version__ = "0.1.0"
