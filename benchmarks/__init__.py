"""Measurements: `python -m benchmarks.NAME`, described in docs/benchmarks.md. Nothing at run time imports them."""
