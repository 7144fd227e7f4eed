"""Benchmarks: `python -m tests.bench` writes build/bench.json. Every speed is a ratio to a baseline
of the same run."""
