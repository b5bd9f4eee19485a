"""Component ``compare``."""
