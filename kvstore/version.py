"""The version of the package. Here, so that any layer may read it."""

__version__ = "0.1.0"
