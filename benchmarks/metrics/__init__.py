"""Estimates from noised validation data, and stopping by them."""
