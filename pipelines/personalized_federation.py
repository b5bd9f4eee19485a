"""Pipeline for one experiment: partition, federation, evaluation, report."""

from kfp import dsl

from fedloom.kubeflow.catalog import component
from fedloom.kubeflow.task_settings import CONFIG, DAY, HOUR, MINUTE, sized, with_storage

cleanup = component("cleanup")
evaluate = component("evaluate")
federate = component("federate")
fetch = component("fetch")
partition = component("partition")
plan = component("plan")
report = component("report")


@dsl.pipeline(
    name="personalized-federation",
    description="A personalized federated model from one experiment file: partition, federation, evaluation, report.",
    pipeline_config=CONFIG,
)
def personalized_federation(
    experiment: str,
    overrides: list[str] = [],  # noqa: B006 (Kubeflow reads the default and never modifies it)
    backend: str = "kubernetes",
    cluster: str = "",
    checkpoint: str = "last",
    storage_secret: str = "fedloom-storage",
    source: str = "",
) -> None:
    """Train and evaluate a model for every client of one experiment.

    Args:
        experiment: Text of an experiment file.
        overrides: Texts `key=value` that replace values of the file.
        backend: kubernetes (client pods) or local (processes of one pod).
        cluster: Settings of the client pods as JSON (docs/cluster.md).
        checkpoint: Checkpoint to evaluate: last, best or a round.
        storage_secret: Secret with the credentials of the experiment's storage.
        source: Folder or s3://bucket/prefix to copy the data set from; empty to download it from its publisher.
    """
    run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    leave_nothing = cleanup(run_id=run_id, backend=backend, cluster=cluster).set_caching_options(False)
    with dsl.ExitHandler(sized(leave_nothing, 10 * MINUTE)):
        planned = sized(plan(experiment=experiment, overrides=overrides), 10 * MINUTE).outputs
        fetched = sized(fetch(dataset=planned["dataset"], root=planned["root"], source=source), 6 * HOUR)
        files = with_storage(fetched, storage_secret).outputs["files"]
        shards = sized(partition(data=planned["data"], files=files), 6 * HOUR, memory="4Gi").outputs["shards"]
        federated = federate(
            experiment=planned["experiment"],
            shards=shards,
            run_id=run_id,
            backend=backend,
            cluster=cluster,
            storage_secret=storage_secret,
        )
        with_storage(federated, storage_secret).set_caching_options(False)
        model = federated.outputs["model"]
        evaluated = sized(evaluate(model=model, shards=shards, checkpoint=checkpoint), DAY, cpu="1", memory="4Gi")
        with_storage(evaluated, storage_secret)  # client states remain in the store
        sized(report(run=model, metrics=evaluated.outputs["metrics"]), HOUR)
