"""Kubeflow Pipelines: what the components do, and compiling, submitting and running the pipelines (docs/kubeflow.md).

``components`` and ``pipelines`` are the folders of that name at the top of the repository.
"""
