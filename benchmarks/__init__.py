"""Benchmarks: `python -m benchmarks` lists them, docs/benchmarks.md has the results. No product code imports them."""
