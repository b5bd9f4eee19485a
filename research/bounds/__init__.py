"""Bounds of the papers as functions, for pages and tests; no method or command uses them (docs/theory.md)."""
