"""Fixtures of the integration tests."""

from tests.daemon import daemons

__all__ = ["daemons"]
