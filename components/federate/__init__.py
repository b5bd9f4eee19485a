"""Component ``federate``."""
