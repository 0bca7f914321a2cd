"""Benchmarks of a member that runs without torch."""
