"""Measurements of clients and their summary over a federation, shared by workers and the round loop."""
