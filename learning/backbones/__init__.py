"""Frozen language models on disk: checkpoints, the canonical file, and downloads from the hub."""
