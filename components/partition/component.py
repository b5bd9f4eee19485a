"""Deal a data set out to clients."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Output

from fedloom.kubeflow.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def partition(data: str, files: Input[Dataset], shards: Output[Dataset]) -> None:
    """Deal a data set out to clients: a manifest, and one file for each client.

    Args:
        data: What decides the partition, as JSON, from `plan` or `grid`.
        files: The data set, from `fetch`.
        shards: Will hold the manifest and the clients' files; the metadata name its fingerprint.
    """
    from pathlib import Path

    from fedloom.kubeflow import steps

    shards.metadata.update(steps.partition(data, Path(files.path), Path(shards.path)))
