"""Runs of experiments: closed, open, replayed, resumed and evaluated; a library that prints nothing."""
