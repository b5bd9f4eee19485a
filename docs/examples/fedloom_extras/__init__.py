"""Example package that adds methods, a data source, a task and a model to FedLoom (docs/extending.md)."""
