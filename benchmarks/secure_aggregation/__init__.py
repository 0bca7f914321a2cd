"""Benchmarks of the cost of secure aggregation."""
