"""The elastic scheduler: water level, cells, routes, engine and trainer lifecycles."""

__version__ = "0.1.0"

__all__ = ["__version__"]
