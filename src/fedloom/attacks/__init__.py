"""Attacks as evaluation: what can be learned about clients' data from a model, a training run, or one update."""
