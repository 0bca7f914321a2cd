"""Benchmark of the reconstruction of tokens from gradients."""
