"""Tools that every command uses: console, logs, metrics, TLS settings, clean text, durable and private files."""
