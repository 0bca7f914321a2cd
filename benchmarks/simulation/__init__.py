"""Benchmarks of the simulation, alone and beside Flower's."""
