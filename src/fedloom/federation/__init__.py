"""Cohorts, round loop, sampling, randomness, placement, journal, checkpoint; not how messages travel."""
