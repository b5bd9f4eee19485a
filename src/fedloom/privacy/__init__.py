"""Differential privacy: the guarantees of mechanisms, and their composition."""
