"""Component that saves the models of clients for KServe."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Model, Output

from fedloom.kubeflow.catalog import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def export(
    model: Input[Model],
    shards: Input[Dataset],
    served: Output[Model],
    checkpoint: str = "last",
    model_format: str = "fedloom",
) -> None:
    """Give every client its own model and save it in the layout that KServe serves.

    Args:
        model: The run from `federate`.
        shards: The partition the run was trained on, or another of the same data set, whose clients are all new.
        served: Output: the folder whose URI is the storage URI of an InferenceService.
        checkpoint: last, best or a round.
        model_format: fedloom (the run with its clients' models, for `fedloom serve`) or onnx (models for Triton).
    """
    from pathlib import Path

    from fedloom.kubeflow import steps

    found = steps.export_task(Path(model.path), Path(shards.path), checkpoint, model_format, Path(served.path))
    served.metadata.update({**model.metadata, **found})
