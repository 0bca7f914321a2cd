"""Mechanisms: how a trained update is clipped and noised before it is sent."""
