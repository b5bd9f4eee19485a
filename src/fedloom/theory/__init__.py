"""The papers' bounds and optimal weights, as functions (docs/theory.md)."""
