"""Kubeflow components: thin, one folder each; what they do is in ``fedloom.kubeflow.steps``."""
