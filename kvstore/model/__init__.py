"""The values that everything else agrees on: keys, fingerprints, layouts, reasons.

Pure: no clock, no I/O, no threads, nothing outside the standard library. Every layer may import it,
it imports none of them. What it computes is the same in each process, Python version and hash seed
(`tests/golden`).
"""
