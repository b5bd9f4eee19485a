"""Cohorts, round loop, sampling, randomness, placement, journal and checkpoints, independent of the transport."""
