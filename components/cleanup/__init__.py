"""Component ``cleanup``."""
