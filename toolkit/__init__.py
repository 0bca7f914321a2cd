"""Tools of every command: console, logs, metrics, TLS contexts, clean text, durable and private files."""
