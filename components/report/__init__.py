"""Component ``report``."""
