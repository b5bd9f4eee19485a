"""Component that fetches a complete data set and verifies its checksums."""

from kfp import dsl
from kfp.dsl import Dataset, Output

from fedloom.kubeflow.catalog import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def fetch(dataset: str, files: Output[Dataset], root: str = "", source: str = "") -> None:
    """Fetch a data set, verify its checksums, and keep its files as an artifact.

    Args:
        dataset: Name of the data set, such as fashion-mnist.
        files: Output: the files of the data set.
        root: Folder for data sets on this machine; empty for the default.
        source: Folder or s3://bucket/prefix to copy the files from; empty to download from the data set's publisher.
    """
    from pathlib import Path

    from fedloom.kubeflow import steps

    files.metadata.update(steps.fetch_task(dataset, Path(files.path), root, source))
