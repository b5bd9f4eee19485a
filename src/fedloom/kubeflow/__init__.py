"""Kubeflow Pipelines: component code, and compiling, submitting and running pipelines (docs/kubeflow.md).

The components and pipelines themselves are files at the top of the repository (:mod:`fedloom.kubeflow.catalog`).
"""
