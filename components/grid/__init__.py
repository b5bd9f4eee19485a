"""Component ``grid``."""
