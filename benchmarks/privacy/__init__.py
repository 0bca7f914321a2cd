"""Benchmarks of the cost of privacy, and attacks on its claims."""
