"""Kubeflow Pipelines: what the components do, and compiling, submitting and running the pipelines (docs/kubeflow.md).

The components and pipelines themselves are files at the top of the repository (:mod:`fedloom.kubeflow.catalog`).
"""
