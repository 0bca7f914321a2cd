"""Answers to surveys: what a member counts, the noise that it adds, and what that costs. No torch."""
