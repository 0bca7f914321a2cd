"""Language models that write: federated fine-tuning of SmolLM2 with and without noise."""
