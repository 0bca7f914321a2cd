"""Benchmarks of federated learning among institutions on TREC (Zhu et al. 2020)."""
