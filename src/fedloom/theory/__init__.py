"""Bounds and optimal weights of the papers, as functions (docs/theory.md)."""
