"""Trackers: where a run's numbers go beside its folder, by the entry point ``fedloom.observers`` (docs/tracking.md)."""
