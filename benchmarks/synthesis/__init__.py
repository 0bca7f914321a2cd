"""Synthetic text against private training (DP-RVAE)."""
