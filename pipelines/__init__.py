"""Kubeflow pipelines, and beside each its compiled form: what a cluster is given.

A pipeline is imported from its own module; to import kfp and make components takes seconds.
"""
