"""The core: commands in, effects out. One thread, O(keys), no clock, no I/O.

`core.Core` is the whole interface. It owns all state of blocks; the shell owns none.
"""
