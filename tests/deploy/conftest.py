"""Fixtures of the tests of deploy/ that start real daemons."""

from tests.daemon import daemons

__all__ = ["daemons"]
