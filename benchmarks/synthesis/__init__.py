"""Benchmarks of synthetic text beside private training (DP-RVAE)."""
