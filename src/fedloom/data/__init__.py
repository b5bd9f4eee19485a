"""Data sources (official data sets), partitions, and the federated data set on disk (docs/data.md).

Everything except ``federated`` runs without torch, so that fetching, partitioning and validating an experiment start
fast.
"""
