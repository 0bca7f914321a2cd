"""Reconstruction of tokens from gradients."""
