"""A user-defined pipeline around one of our components (kfp reads annotations, so they are not postponed here)."""

from kfp import dsl, kubernetes
from kfp.dsl import Dataset, Input

from fedloom.kubeflow.catalog import component

federate = component("federate")


@dsl.pipeline
def own(experiment: str, shards: Input[Dataset]) -> None:
    task = federate(experiment=experiment, shards=shards, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
    task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(2)
    kubernetes.add_toleration(task, key="gpu", operator="Exists", effect="NoSchedule")
    kubernetes.add_node_selector(task, "pool", "a100")
