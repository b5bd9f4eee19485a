"""Trackers, which send a run's numbers elsewhere, by entry point ``fedloom.observers`` (docs/metrics.md)."""
