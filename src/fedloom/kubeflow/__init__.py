"""Kubeflow Pipelines: code of the components, and compiling, submitting and running of the pipelines
(docs/kubeflow.md).

The components and pipelines themselves are files at the top of the repository (:mod:`fedloom.kubeflow.catalog`).
"""
