"""Component ``evaluate``."""
