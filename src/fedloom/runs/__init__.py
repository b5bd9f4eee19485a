"""Runs on disk: the files of a run folder, reading, listing and publishing (docs/design.md, §2)."""
