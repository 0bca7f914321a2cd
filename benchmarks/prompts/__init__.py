"""Prompts over a frozen language model (FedPrompt)."""
