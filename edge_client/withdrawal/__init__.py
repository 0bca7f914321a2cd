"""A member's own withdrawal: what it remembers, what it sends, and what it can say by itself. Does not import torch."""
