"""A person's approval of each job: what a steward signs, when it counts, and where it lies. Does not import torch."""
