"""Local web page for runs: lists, curves, comparisons, clients, and a live federation; read-only."""
