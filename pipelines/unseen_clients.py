"""A trained model, and clients that it has never seen: Algorithm 1 alone."""

from kfp import dsl
from kfp.dsl import Model

from fedloom.kubeflow.catalog import component
from fedloom.kubeflow.task_settings import CONFIG, DAY, HOUR, MINUTE, sized, with_server, with_storage

evaluate = component("evaluate")
fetch = component("fetch")
partition = component("partition")
plan = component("plan")
report = component("report")


@dsl.pipeline(
    name="unseen-clients",
    description="New clients get their own models from a trained one, without training, and are measured.",
    pipeline_config=CONFIG,
)
def unseen_clients(
    experiment: str,
    model: str,
    overrides: list[str] = [],  # noqa: B006 (Kubeflow takes the default from here, and never changes it)
    checkpoint: str = "last",
    storage_secret: str = "fedloom-storage",
    source: str = "",
    serve: str = "",
    serve_secret: str = "fedloom-serve",
) -> None:
    """Give clients that took no part in training their own models.

    Args:
        experiment: Text of an experiment file: its `data` and `seed` say who the new clients are.
        model: URI of the model artifact of an earlier pipeline run, or a run's folder where the artifacts lie.
        overrides: Texts `key=value` that replace values of the file, such as `seed=2`.
        checkpoint: last, best or a round.
        storage_secret: Secret with the credentials of the model's storage, and of `source`.
        source: Folder or s3://bucket/prefix to take the data set from; empty for where it is published.
        serve: HOST:PORT of a server that hands out models of this run (`fedloom serve`); empty: they are made here.
        serve_secret: Secret with what it is asked with: ca.crt; tls.crt and tls.key, or token.
    """
    trained = dsl.importer(artifact_uri=model, artifact_class=Model, reimport=False).output
    planned = sized(plan(experiment=experiment, overrides=overrides), 10 * MINUTE).outputs
    fetched = sized(fetch(dataset=planned["dataset"], root=planned["root"], source=source), 6 * HOUR)
    files = with_storage(fetched, storage_secret).outputs["files"]
    shards = sized(partition(data=planned["data"], files=files), 6 * HOUR, memory="4Gi").outputs["shards"]
    evaluated = sized(
        evaluate(model=trained, shards=shards, checkpoint=checkpoint, serve=serve), DAY, cpu="1", memory="4Gi"
    )
    with_server(with_storage(evaluated, storage_secret), serve_secret)
    sized(report(run=evaluated.outputs["evaluation"], metrics=evaluated.outputs["metrics"]), HOUR)
