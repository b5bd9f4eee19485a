"""Pipeline that runs one federation per method and seed, then compares them."""

from kfp import dsl

from fedloom.kubeflow.catalog import component
from fedloom.kubeflow.task_settings import CONFIG, HOUR, MINUTE, sized, with_storage

cleanup = component("cleanup")
compare = component("compare")
federate = component("federate")
fetch = component("fetch")
grid = component("grid")
partition = component("partition")
plan = component("plan")

AT_ONCE = 4
"""Federations that run at the same time."""


@dsl.pipeline(
    name="compare-methods",
    description="Personalized federated methods on the same clients, each with every seed: mean, deviation, tests.",
    pipeline_config=CONFIG,
)
def compare_methods(
    experiment: str,
    methods: list[str] = [""],  # noqa: B006 (Kubeflow reads the defaults and never modifies them)
    seeds: list[int] = [1, 2, 3],  # noqa: B006
    overrides: list[str] = [],  # noqa: B006
    backend: str = "kubernetes",
    cluster: str = "",
    storage_secret: str = "fedloom-storage",
    source: str = "",
) -> None:
    """Compare methods on one experiment.

    Args:
        experiment: Text of an experiment file.
        methods: Changes that each method makes: texts `key=value; key=value`; an empty text changes nothing.
        seeds: Numbers such as [1, 2, 3]; empty for the experiment's own.
        overrides: Texts `key=value` that replace values of the file, for all methods.
        backend: kubernetes (client pods) or local (processes of one pod).
        cluster: Settings of the client pods of each federation as JSON (docs/cluster.md).
        storage_secret: Secret with the credentials of the experiment's storage.
        source: Folder or s3://bucket/prefix to copy the data set from; empty to download it from its publisher.
    """
    run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    leave_nothing = cleanup(run_id=run_id, backend=backend, cluster=cluster).set_caching_options(False)
    with dsl.ExitHandler(sized(leave_nothing, 10 * MINUTE)):
        planned = sized(plan(experiment=experiment, overrides=overrides), 10 * MINUTE).outputs
        fetched = sized(fetch(dataset=planned["dataset"], root=planned["root"], source=source), 6 * HOUR)
        files = with_storage(fetched, storage_secret).outputs["files"]
        points = sized(grid(experiment=planned["experiment"], methods=methods, seeds=seeds), 10 * MINUTE)
        with dsl.ParallelFor(points.output, parallelism=AT_ONCE) as point:
            dealt = sized(partition(data=point.data, files=files), 6 * HOUR, memory="4Gi")
            federated = federate(
                experiment=point.experiment,
                shards=dealt.outputs["shards"],
                run_id=run_id,
                task=point.label,
                backend=backend,
                cluster=cluster,
                storage_secret=storage_secret,
            )
            with_storage(federated, storage_secret).set_caching_options(False)
        sized(compare(models=dsl.Collected(federated.outputs["model"])), HOUR, cpu="1", memory="2Gi")
