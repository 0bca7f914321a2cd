"""Benchmarks of FedVocab and the methods that it is compared with."""
