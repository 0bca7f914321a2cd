"""Benchmarks of what running a federation costs and withstands."""
