"""Benchmarks of prompts over a frozen language model (FedPrompt)."""
