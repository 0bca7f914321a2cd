"""The model library: models, methods, training, noise and privacy accounting. It knows no federation and no network."""
