"""Validation data that a member keeps back, and the noised metrics that it sends of it. No torch."""
