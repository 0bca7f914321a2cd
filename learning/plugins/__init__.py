"""Models of one's own: architectures that installed distributions register (docs/own-models.md)."""
