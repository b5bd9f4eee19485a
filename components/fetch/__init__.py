"""Component ``fetch``."""
