"""Data: sources (official data sets), partition (who gets what), and the federated data set on disk (docs/data.md).

Everything but ``federated`` runs without torch, so that fetching, partitioning and checking an experiment start fast.
"""
