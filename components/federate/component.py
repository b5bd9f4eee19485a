"""Component that runs a federation, on client pods or in local processes."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Metrics, Model, Output

from fedloom.kubeflow.catalog import IMAGE

FOR_CLIENT_PODS = [
    dsl.TaskConfigField.RESOURCES,
    dsl.TaskConfigField.KUBERNETES_TOLERATIONS,
    dsl.TaskConfigField.KUBERNETES_NODE_SELECTOR,
    dsl.TaskConfigField.KUBERNETES_AFFINITY,
]
"""Task settings that apply to the client pods; the task's own pod only starts and watches them."""


@dsl.component(base_image=IMAGE, install_kfp_package=False, task_config_passthroughs=FOR_CLIENT_PODS)
def federate(
    experiment: str,
    shards: Input[Dataset],
    model: Output[Model],
    metrics: Output[Metrics],
    run_id: str,
    task: str = "federate",
    backend: str = "kubernetes",
    cluster: str = "",
    storage_secret: str = "",
    task_config: dsl.TaskConfig = None,
) -> None:
    """Train a model for every client.

    Args:
        experiment: Complete experiment as JSON, from `plan` or `grid`.
        shards: The partition.
        model: Output: the complete run, with checkpoints, metrics, summary, journal and logs.
        metrics: Accuracies of the last round; the file is summary.json.
        run_id: Id of the pipeline run.
        task: Name of the federation within the pipeline run.
        backend: kubernetes (client pods) or local (processes of this pod or machine).
        cluster: Settings of the client pods as JSON (docs/cluster.md).
        storage_secret: Secret with the credentials of the experiment's storage, unless the settings name one.
        task_config: Filled in by Kubeflow: resources, tolerations, node selector and affinity set on the task.
    """
    from pathlib import Path

    from fedloom.kubeflow import steps

    out = Path(model.path)
    found = steps.federate_task(
        experiment, Path(shards.path), out, backend=backend, cluster=cluster, storage_secret=storage_secret,
        run_id=run_id, task=task, task_config=vars(task_config) if task_config else None,
    )  # fmt: skip
    model.metadata.update(found)
    steps.log(metrics, (out / "summary.json").read_text())
