"""The torture: `python -m tests.torture` breaks the store in every way at hand and checks both
promises. CONTRIBUTING.md tells how to run it and how to read what it writes.
"""
