"""Pipelines that kfp's own functions configure (kfp reads annotations, so they are not postponed here)."""

from kfp import dsl, kubernetes
from kfp.dsl import Dataset, Input

from fedloom.kubeflow.catalog import component

federate, report = component("federate"), component("report")


@dsl.pipeline
def own(experiment: str, shards: Input[Dataset]) -> None:
    """Run one of our components with the resources that a user sets."""
    task = federate(experiment=experiment, shards=shards, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
    task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(2)
    kubernetes.add_toleration(task, key="gpu", operator="Exists", effect="NoSchedule")
    kubernetes.add_node_selector(task, "pool", "a100")


@dsl.pipeline
def configured(run: dsl.Input[dsl.Artifact], metrics: dsl.Input[dsl.Metrics]) -> None:
    """Run a task configured as `test_pipeline_pods.EVERYTHING` says."""
    task = report(run=run, metrics=metrics)
    task.set_cpu_request("750m").set_memory_request("2Gi").set_cpu_limit("2").set_memory_limit("4Gi")
    task.set_accelerator_type("nvidia.com/mig-1g.5gb").set_accelerator_limit(2)
    kubernetes.set_timeout(task, 3600)
    kubernetes.set_image_pull_secrets(task, ["registry", "mirror"])
    kubernetes.add_toleration(task, key="gpu", operator="Exists", effect="NoExecute", toleration_seconds=60)
    kubernetes.add_node_selector(task, "pool", "a100")
    expression = {"key": "gpu", "operator": "In", "values": ["a100", "h100"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    kubernetes.add_node_affinity_json(task, {"requiredDuringSchedulingIgnoredDuringExecution": terms})
    kubernetes.add_pod_label(task, "team", "vision")
    kubernetes.add_pod_label(task, "example.org/cost", "")
    kubernetes.add_pod_annotation(task, "example.org/note", "any text: at all")
