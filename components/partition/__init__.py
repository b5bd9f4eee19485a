"""Component ``partition``."""
