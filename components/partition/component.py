"""Component that partitions a data set into clients."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Output

from fedloom.kubeflow.catalog import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def partition(data: str, files: Input[Dataset], shards: Output[Dataset]) -> None:
    """Partition a data set into clients: a manifest, and one file per client.

    Args:
        data: The settings that determine the partition, as JSON, from `plan` or `grid`.
        files: The data set from `fetch`.
        shards: Output: the manifest and the clients' files; its metadata hold the fingerprint.
    """
    from pathlib import Path

    from fedloom.kubeflow import steps

    shards.metadata.update(steps.partition_task(data, Path(files.path), Path(shards.path)))
