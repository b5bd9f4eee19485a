"""A federated method of my own."""
