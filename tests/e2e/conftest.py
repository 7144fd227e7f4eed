"""Fixtures of the tests that start real daemons."""

from tests.daemon import daemons

__all__ = ["daemons"]
