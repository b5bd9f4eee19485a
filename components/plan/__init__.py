"""Component ``plan``."""
