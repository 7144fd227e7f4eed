"""What is worth keeping, and what is worth loading: eviction, links, plans.

Pure: time is an argument, nothing is read or written. It stands on the model alone; the core, the
simulator and the calculator stand on it.
"""
