"""The version whose interface this is."""

__version__ = "0.5.23"
