"""Data sources (official data sets), partitions, and the federated data set on disk (docs/data.md).

Fetching, partitioning and validating an experiment import no torch, so that they start quickly.
"""
