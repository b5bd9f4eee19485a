"""Component that registers a trained model in the Kubeflow Model Registry."""

from kfp import dsl
from kfp.dsl import Input, Model

from fedloom.kubeflow.catalog import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(
    model: Input[Model],
    registry: str,
    run_id: str,
    name: str = "",
    version: str = "",
    checkpoint: str = "last",
    uri: str = "",
) -> str:
    """Register a run's model with its metrics, its privacy, and the pipeline run that trained it.

    Args:
        model: The run from `federate`.
        registry: URL of the model registry; $FEDLOOM_REGISTRY_TOKEN, if set, is the token.
        run_id: Id of the pipeline run.
        name: Name of the model; empty for the experiment's.
        version: Name of the version; empty for the round and the checkpoint's digest.
        checkpoint: last, best or a round.
        uri: URI of the run's folder for those who serve it; empty for the artifact's.

    Returns:
        Id of the version in the registry.
    """
    from pathlib import Path

    from fedloom.kubeflow import registration

    where = uri or model.uri
    return registration.register_task(Path(model.path), registry, run_id, name, version, checkpoint, where)
