"""Replays recorded traces through the production core, policies and disk ring on a virtual clock.

`trace` reads the files, `replay` serves the requests, `archive` is the disk without a device,
`optimum` what nobody can beat, `lab` many runs with progress. Nothing here is part of a daemon.
"""
