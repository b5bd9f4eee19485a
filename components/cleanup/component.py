"""Component that removes a pipeline run's federations from the cluster."""

from kfp import dsl

from fedloom.kubeflow.catalog import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def cleanup(run_id: str, backend: str, cluster: str) -> None:
    """Remove everything that a pipeline run's federations left on the cluster; for an exit handler.

    Args:
        run_id: Id of the pipeline run.
        backend: The `backend` given to `federate`.
        cluster: The `cluster` given to `federate`.
    """
    from fedloom.kubeflow import steps

    steps.cleanup_task(backend, run_id, cluster)
