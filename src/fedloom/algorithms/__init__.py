"""One module per method: its server algorithm, its client algorithm, its settings."""
