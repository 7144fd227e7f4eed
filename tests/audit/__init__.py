"""Audits of the real daemon by measurement, run by hand: `python -m tests.audit.timing`."""
