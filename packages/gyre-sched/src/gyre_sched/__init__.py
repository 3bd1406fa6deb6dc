"""The elastic scheduler: water level, cells, routes, engine and trainer lifecycles."""

__version__ = "0.1.0"
