"""One module per method: its server half, its client half, its settings."""
