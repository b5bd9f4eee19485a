"""Fetch a data set, whole and checked."""

from kfp import dsl
from kfp.dsl import Dataset, Output

from fedloom.kubeflow.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def fetch(dataset: str, files: Output[Dataset], root: str = "", source: str = "") -> None:
    """Fetch a data set, compare it with its checksums, and keep its files as an artifact.

    Args:
        dataset: Name of the data set, such as fashion-mnist.
        files: Will hold its files.
        root: Folder for data sets on this machine; empty for the usual one.
        source: Folder or s3://bucket/prefix to take the files from; empty for where the data set is published.
    """
    from pathlib import Path

    from fedloom.kubeflow import steps

    files.metadata.update(steps.fetch(dataset, Path(files.path), root, source))
