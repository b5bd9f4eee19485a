"""Katib Experiment of a hyperparameter search: the same space as ``fedloom search``, with a Job for each trial."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedloom.cluster.api import Api
from fedloom.cluster.federate import check_cluster_settings, storage_environment
from fedloom.cluster.manifests import (
    CHECKPOINT_GRACE_S,
    INSTANCE,
    MANAGED_BY,
    NAME,
    UNRETRIED,
    Manifest,
    container_spec,
    failure_policy,
    pod_spec,
    pod_template,
    resources,
)
from fedloom.cluster.settings import AggregatorPod, ClusterSettings, TaskConfig
from fedloom.core.urls import is_url
from fedloom.core.words import shortened
from fedloom.data import datasets
from fedloom.engine.tracking import TRACK
from fedloom.errors import ExitCode, ExperimentError, argument
from fedloom.experiment import Experiment, parse_experiment
from fedloom.experiment.search_space import Parameter, SearchPlan, SearchSpace, plan_search
from fedloom.kubeflow import planning
from fedloom.tasks.names import Headline
from fedloom.tasks.registry import task_of
from fedloom.trackers.katib import EPSILON, KATIB_FILE, METRICS_PATH, objective_name
from fedloom.tuning.trials import STARTUP, Schedule

TEMPLATE = Path(__file__).with_name("katib.yaml")
"""Parts of the Experiment that are the same for every search."""

MOUNTED = "/etc/fedloom"
"""Folder of a trial's pod with the experiment file."""

LONGEST_NAME = 40
"""Maximum length of a name to which Katib appends."""

PARALLEL = 3
"""Default number of parallel trials, as Katib's."""


@dataclass(frozen=True)
class KatibSearch:
    """Input for the objects of a search on Katib.

    Attributes
    ----------
    plan
        Checked search.
    base
        The experiment with the overrides, without parameters.
    text, overrides
        The experiment file, and ``key=value`` for every trial.
    cluster
        Settings of the trials' pods: ``image`` or ``worker_image``, ``worker``, ``gpu``, ``storage_secret`` and others.
    partition
        URL of the partition that all trials use (``fedloom partition --out``).
    parallel
        Number of parallel trials.
    """

    plan: SearchPlan
    base: Experiment
    text: str
    overrides: tuple[str, ...]
    cluster: ClusterSettings
    partition: str
    parallel: int

    @property
    def title(self) -> str:
        """Name of the Experiment and of its ConfigMap, from the experiment's name and a digest."""
        parts = [self.base.resolved_yaml(), self.plan.space.model_dump_json(), self.partition]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
        plain = re.sub(r"[^a-z0-9]+", "-", self.base.name.lower()).strip("-")
        plain = plain if plain[:1].isalpha() else f"search-{plain}"
        return f"{plain[: LONGEST_NAME - 9].rstrip('-')}-{digest}"


def plan_katib_search(
    text: str,
    overrides: Sequence[str],
    space: SearchSpace,
    cluster: ClusterSettings,
    partition: str,
    parallel: int | None = None,
) -> KatibSearch:
    """Check a search for Katib, and return the input for its objects.

    Raise ExperimentError if the space, the experiment or a setting of the pods is invalid, or Katib cannot search the
    space.

    Parameters
    ----------
    text, overrides, partition, parallel
        As in :class:`KatibSearch`; by default three trials run in parallel.
    """
    planning.plan(text, overrides)  # refuses data that are on this machine alone

    def make(changes: Sequence[str]) -> Experiment:
        return parse_experiment(text, [*overrides, *changes])

    plan = plan_search(space, make)
    base = make(plan.fixed)
    for override in overrides:
        if "${trial" in override:
            raise ExperimentError(
                f"{argument('set')}{shortened(override)}: Katib replaces ${{trial...}} in a trial's command; write the "
                "value into the experiment file.",
                key="set",
                found=override,
            )
    if space.early_stopping == "hyperband":
        raise ExperimentError(
            "early_stopping must be median or absent on Katib, whose Hyperband chooses other values (got hyperband).",
            key="early_stopping",
        )
    check_cluster_settings(base, cluster, TaskConfig())
    if not is_url(partition):
        raise ExperimentError(
            f"{argument('partition')} must be a URL that pods can read, s3://BUCKET/PREFIX (got {partition}).",
            key="partition",
            found=partition,
        )
    cluster = cluster.with_claims(base.storage, partition)
    return KatibSearch(plan, base, text, tuple(overrides), cluster, partition, min(parallel or PARALLEL, plan.trials))


def search_objects(search: KatibSearch) -> list[Manifest]:
    """Return the objects of a search: a ConfigMap with the experiment file, and Katib's Experiment.

    Raise ExperimentError if Katib cannot pass on a value of the space, or the direction of the objective is not known.
    """
    labels = {**search.cluster.labels, NAME: "search", INSTANCE: search.title, MANAGED_BY: "fedloom"}
    metadata: Manifest = {"name": search.title, "labels": labels}
    if search.cluster.namespace is not None:
        metadata["namespace"] = search.cluster.namespace
    file = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"experiment.yaml": search.text}}
    experiment: Manifest = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8")) | {"metadata": metadata}
    plan, headline = search.plan, known_headline(search.base)
    objective, private = objective_name(headline), search.base.federation.privacy is not None
    spec = experiment["spec"]
    spec |= {
        "objective": {
            "type": "maximize" if headline.higher_is_better else "minimize",
            "objectiveMetricName": objective,
            **({"additionalMetricNames": [EPSILON]} if private else {}),
            "metricStrategies": [
                {"name": name, "value": "latest"} for name in (objective, *([EPSILON] if private else []))
            ],
        },
        "algorithm": {
            "algorithmName": plan.space.sampler,
            "algorithmSettings": _settings({"random_state": plan.space.seed}),
        },
        "parallelTrialCount": search.parallel,
        "maxTrialCount": plan.trials,
        "maxFailedTrialCount": plan.trials,  # values with which training diverges are a result
        "parameters": [_parameter(one, is_listed=plan.space.sampler == "grid") for one in plan.parameters],
    }
    if plan.space.early_stopping == "median":
        warm_up = Schedule(search.base.federation.rounds, search.base.evaluation.every).warm_up
        settings = _settings({"min_trials_required": STARTUP, "start_step": warm_up})
        spec["earlyStopping"] = {"algorithmName": "medianstop", "algorithmSettings": settings}
    parameter_names = {f"parameter{i}": parameter.key for i, parameter in enumerate(plan.parameters, start=1)}
    trial = {"name": "trial", "description": "Name of the trial", "reference": "${trialSpec.Name}"}
    spec["trialTemplate"]["trialParameters"] = [
        *({"name": name, "description": key, "reference": key} for name, key in parameter_names.items()), trial
    ]  # fmt: skip
    _complete_job(spec["trialTemplate"]["trialSpec"], search, labels, parameter_names)
    return [file, experiment]


def submit_search(api: Api, objects: Sequence[Manifest]) -> None:
    """Create the objects of a search; none is left if one cannot be created.

    Raise ExperimentError if there is a search of that name, or Katib is not installed; FedloomError if the cluster
    cannot be reached, or denies access.
    """
    file, experiment = objects
    name = experiment["metadata"]["name"]
    if api.create(file) is None:
        raise ExperimentError(
            f"Kubernetes, namespace {api.namespace}: a search {name} exists already.",
            hint=f"kubectl get experiments.kubeflow.org {name} shows it",
            key="name",
        )
    try:
        if api.create(experiment) is None:
            raise ExperimentError(
                f"Kubernetes, namespace {api.namespace}: an Experiment {name} exists already.",
                key="name",
            )
    except BaseException as error:
        api.delete("ConfigMap", name)
        if isinstance(error, ExperimentError) and "could not find the requested resource" in error.message:
            raise ExperimentError(f"{error.message}; is Katib installed?", hint="docs/search.md#on-katib") from error
        raise


def known_headline(e: Experiment) -> Headline:
    """Return the headline metric of an experiment, determined without its data.

    Raise ExperimentError if the task cannot be determined without the data.
    """
    if e.task is not None:
        return e.task.headline
    source = datasets.find_dataset(e.data.dataset)
    return task_of(source.spec.task).headline


def _parameter(parameter: Parameter, *, is_listed: bool) -> Manifest:
    """Return a parameter in Katib's form: finitely many values as a list, so that Katib passes the same texts."""
    if is_listed or parameter.choices is not None or parameter.step is not None:
        texts = [parameter.text(value) for value in parameter.grid]
        for text in texts:
            if re.search(r'["\\\n]|\$\(|\$\{', text):
                raise ExperimentError(
                    f"parameters.{parameter.key}: {shortened(text)} cannot be used in Katib's template, because it has "
                    "a quotation mark, a backslash, a line break or a $.",
                    key=f"parameters.{parameter.key}",
                )
        return {"name": parameter.key, "parameterType": "categorical", "feasibleSpace": {"list": texts}}
    space = {"min": parameter.text(parameter.low), "max": parameter.text(parameter.high)}
    if parameter.log:
        space["distribution"] = "logUniform"
    return {"name": parameter.key, "parameterType": "int" if parameter.whole else "double", "feasibleSpace": space}


def _complete_job(
    job: Manifest, search: KatibSearch, labels: Mapping[str, str], parameter_names: Mapping[str, str]
) -> None:
    """Complete the Job of a trial, which gets its values as environment variables: no shell interprets them."""
    s, container_name = search.cluster, "trial"
    gpu = {} if s.gpu is None else {s.gpu.resource: s.gpu.count}
    image, needs = s.worker_image or s.image, resources(s.worker, gpu)
    environment = storage_environment(s, search.base.storage, search.partition)
    container = container_spec(s, environment, container_name, image, [_command(search, parameter_names)], needs)
    # Katib joins command and arguments by spaces and hands them to a shell; it takes a shell's own argument as it is.
    container["command"] = ["sh", "-c"]
    values = {name.upper(): f"${{trialParameters.{name}}}" for name in (*parameter_names, "trial")}
    container["env"] += [{"name": name, "value": value} for name, value in {KATIB_FILE: METRICS_PATH, **values}.items()]
    container["volumeMounts"] += [{"name": "experiment", "mountPath": MOUNTED, "readOnly": True}]
    place = AggregatorPod(tolerations=s.tolerations, node_selector=s.node_selector)
    pod = pod_spec(s, container, CHECKPOINT_GRACE_S, place, s.affinity)
    pod["volumes"] += [{"name": "experiment", "configMap": {"name": search.title}}]
    queue = {} if s.queue_name is None else {"kueue.x-k8s.io/queue-name": s.queue_name}
    job["metadata"] = {"labels": {**labels, **queue}}
    if s.annotations:  # Katib refuses empty mappings
        job["metadata"]["annotations"] = {**s.annotations}
    unretried = sorted({*UNRETRIED, int(ExitCode.QUORUM)})
    job["spec"] |= {
        "backoffLimit": s.retries,
        "activeDeadlineSeconds": math.ceil(s.deadline_s),
        "podFailurePolicy": failure_policy("FailJob", container_name, unretried),
        "template": pod_template(s, labels, pod),
    }


def _command(search: KatibSearch, parameter_names: Mapping[str, str]) -> str:
    """Return the shell command of a trial, relative to the pod's working folder."""
    words = ["fedloom", "run", f"{MOUNTED}/experiment.yaml"]
    for override in (*search.overrides, *search.plan.fixed):
        words += ["--set", override]
    words += ["--partition", search.partition]
    quoted = shlex.join([*words, "--no-report", "--resume"])
    quoted = quoted.replace("$", "$$")  # Kubernetes makes one of two, and would expand $(NAME)
    for name, key in parameter_names.items():
        quoted += f' --set {shlex.quote(f"{key}=")}"${name.upper()}"'
    return f'{TRACK}=katib {quoted} --out "runs/$TRIAL"'


def _settings(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]
