"""Leave nothing on the cluster."""

from kfp import dsl

from fedloom.kubeflow.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def cleanup(run_id: str, backend: str, cluster: str) -> None:
    """Remove what federations of a pipeline run have left on the cluster; for an exit handler.

    Args:
        run_id: Id of the pipeline run.
        backend: As of `federate`.
        cluster: As of `federate`.
    """
    from fedloom.kubeflow import steps

    steps.cleanup(backend, run_id, cluster)
