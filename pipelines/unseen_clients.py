"""Pipeline that gives unseen clients models from a trained run, by Algorithm 1 alone."""

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
    overrides: list[str] = [],  # noqa: B006 (Kubeflow reads the default and never modifies it)
    checkpoint: str = "last",
    storage_secret: str = "fedloom-storage",
    source: str = "",
    serve: str = "",
    serve_secret: str = "fedloom-serve",
) -> None:
    """Give clients that took no part in training their own models.

    Args:
        experiment: Text of an experiment file whose `data` and `seed` define the new clients.
        model: URI of the model artifact of an earlier pipeline run, or of a run's folder in the artifact store.
        overrides: Texts `key=value` that replace values of the file, such as `seed=2`.
        checkpoint: last, best or a round.
        storage_secret: Secret with the credentials of the model's storage and of `source`.
        source: Folder or s3://bucket/prefix to copy the data set from; empty to download it from its publisher.
        serve: HOST:PORT of a server that provides models of this run (`fedloom serve`); empty to compute them here.
        serve_secret: Secret with the server credentials: ca.crt; tls.crt and tls.key, or token.
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
