"""Secure sums, and sums with differential privacy of clients: the server learns only sums of the answers."""
