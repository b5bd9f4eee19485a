"""Katib Experiment of a hyperparameter search: the same space as ``fedloom search``, with a Job for each trial.

The sources of Katib define what it expects: ``pkg/apis/controller/experiments/v1beta1`` (fields),
``pkg/webhook/v1beta1`` (checks, and how a trial's command is wrapped in a shell), and
``pkg/metricscollector/v1beta1`` (lines that the file collector reads), of github.com/kubeflow/katib.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.cluster.api import Api
from fedloom.cluster.federate import check_cluster_settings, storage_environment
from fedloom.cluster.manifests import (
    CHECKPOINT_GRACE_S,
    INSTANCE,
    LONGEST_NAME,
    MANAGED_BY,
    NAME,
    UNRETRIED,
    Manifest,
    check_short_name,
    container_spec,
    failure_policy,
    pod_spec,
    pod_template,
    resources,
)
from fedloom.cluster.settings import AggregatorPod, ClusterSettings, TaskConfig
from fedloom.core.words import shortened
from fedloom.data import datasets
from fedloom.errors import ExitCode, ExperimentError, argument
from fedloom.experiment import Experiment, parse_experiment
from fedloom.experiment.search_space import Parameter, SearchPlan, SearchSpace, plan_search
from fedloom.kubeflow import planning
from fedloom.runner.katib_lines import EPSILON, KATIB_FILE, METRICS_PATH, objective_name
from fedloom.runner.tracking import TRACK
from fedloom.runner.trials import REDUCTION, STARTUP, Schedule
from fedloom.storage import is_url
from fedloom.tasks.names import Headline
from fedloom.tasks.registry import task_of

API_VERSION = "kubeflow.org/v1beta1"
CONTAINER = "trial"
"""Name of the container that trains."""

MOUNTED = "/etc/fedloom"
"""Folder of a trial's pod with the experiment file."""

PARALLEL = 3
"""Default number of parallel trials, as Katib's."""

COMPLETE = 'status.conditions.#(type=="Complete")#|#(status=="True")#'
FAILED = 'status.conditions.#(type=="Failed")#|#(status=="True")#'
"""Conditions of a Job that has ended, in Katib's notation."""


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
    name
        Name of the objects; None: from the experiment's name and a digest.
    parallel
        Number of parallel trials; None: 3, and with Hyperband as many as it needs.
    """

    plan: SearchPlan
    base: Experiment
    text: str
    overrides: tuple[str, ...]
    cluster: ClusterSettings
    partition: str
    name: str | None
    parallel: int | None

    @property
    def title(self) -> str:
        """Name of the Experiment and of its ConfigMap.

        Raise ExperimentError if the given name is not valid.
        """
        if self.name is not None:
            return check_short_name(self.name)
        parts = [self.base.resolved_yaml(), self.plan.space.model_dump_json(), self.partition]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
        plain = re.sub(r"[^a-z0-9]+", "-", self.base.name.lower()).strip("-")
        plain = plain if plain[:1].isalpha() else f"search-{plain}"
        return f"{plain[: LONGEST_NAME - 9].rstrip('-')}-{digest}"

    @property
    def schedule(self) -> Schedule:
        """Rounds and evaluations of a trial."""
        return Schedule(self.base.federation.rounds, self.base.evaluation.every)

    @property
    def is_hyperband(self) -> bool:
        """True if Katib chooses the rounds of a trial too."""
        return self.plan.space.early_stopping == "hyperband"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the objects and the pods."""
        own = {NAME: "search", INSTANCE: self.title, MANAGED_BY: "fedloom"}
        return {**self.cluster.labels, **own}


def plan_katib_search(
    text: str,
    overrides: Sequence[str],
    space: SearchSpace,
    cluster: ClusterSettings,
    partition: str,
    name: str | None = None,
    parallel: int | None = None,
) -> KatibSearch:
    """Check a search for Katib, and return the input for its objects.

    Parameters
    ----------
    text, overrides, partition, name, parallel
        As in :class:`KatibSearch`.

    Raises
    ------
    ExperimentError
        If the space, the experiment or a setting of the pods is invalid.
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
    check_cluster_settings(base, cluster, TaskConfig())
    if not is_url(partition):
        raise ExperimentError(
            f"{argument('partition')} must be a URL that pods can read, s3://BUCKET/PREFIX (got {partition}).",
            key="partition",
            found=partition,
        )
    cluster = cluster.with_claims(base.storage, partition)
    return KatibSearch(plan, base, text, tuple(overrides), cluster, partition, name, parallel)


def search_objects(search: KatibSearch) -> list[Manifest]:
    """Return the objects of a search: a ConfigMap with the experiment file, and Katib's Experiment.

    Raises
    ------
    ExperimentError
        If Katib cannot search this space as asked, or the direction of the objective is not known.
    """
    metadata: Manifest = {"name": search.title, "labels": search.labels}
    if search.cluster.namespace is not None:
        metadata["namespace"] = search.cluster.namespace
    file = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"experiment.yaml": search.text}}
    return [file, {"apiVersion": API_VERSION, "kind": "Experiment", "metadata": metadata, "spec": _spec(search)}]


def submit_search(api: Api, objects: Sequence[Manifest]) -> None:
    """Create the objects of a search; none is left if one cannot be created.

    Raises
    ------
    ExperimentError
        If there is a search of that name, or Katib is not installed.
    FedloomError
        If the cluster cannot be reached, or denies access.
    """
    file, experiment = objects
    name = experiment["metadata"]["name"]
    if api.create(file) is None:
        raise ExperimentError(
            f"Kubernetes, namespace {api.namespace}: a search {name} exists already.",
            hint=f"kubectl get experiments.kubeflow.org {name} shows it; for another search, give {argument('name')}",
            key="name",
        )
    try:
        if api.create(experiment) is None:
            raise ExperimentError(
                f"Kubernetes, namespace {api.namespace}: an Experiment {name} exists already.",
                hint=f"give another {argument('name')}",
                key="name",
            )
    except BaseException as error:
        api.delete("ConfigMap", name)
        if isinstance(error, ExperimentError) and "could not find the requested resource" in error.message:
            raise ExperimentError(f"{error.message}; is Katib installed?", hint="docs/search.md#on-katib") from error
        raise


def known_headline(e: Experiment) -> Headline:
    """Return the headline metric of an experiment, determined without its data.

    Raises
    ------
    ExperimentError
        If the task cannot be determined without the data.
    """
    if e.task is not None:
        return e.task.headline
    source = datasets.find_dataset(e.data.dataset)
    return task_of(source.spec.task).headline


def _spec(search: KatibSearch) -> Manifest:
    plan, headline = search.plan, known_headline(search.base)
    objective, private = objective_name(headline), search.base.federation.privacy is not None
    strategies = [objective, *([EPSILON] if private else [])]
    spec: Manifest = {
        "objective": {
            "type": "maximize" if headline.higher_is_better else "minimize",
            "objectiveMetricName": objective,
            **({"additionalMetricNames": [EPSILON]} if private else {}),
            "metricStrategies": [{"name": name, "value": "latest"} for name in strategies],
        },
        "algorithm": _algorithm(search),
        "parallelTrialCount": _parallel(search),
        "maxTrialCount": plan.trials,
        "maxFailedTrialCount": plan.trials,  # values with which training diverges are a result
        "parameters": _parameters(search),
        "metricsCollectorSpec": {
            "collector": {"kind": "File"},
            "source": {"fileSystemPath": {"path": METRICS_PATH, "kind": "File", "format": "TEXT"}},
        },
        "trialTemplate": _template(search),
    }
    if plan.space.early_stopping == "median":
        settings = {"min_trials_required": STARTUP, "start_step": search.schedule.warm_up}
        spec["earlyStopping"] = {"algorithmName": "medianstop", "algorithmSettings": _settings(settings)}
    return spec


def _algorithm(search: KatibSearch) -> Manifest:
    if not search.is_hyperband:
        settings = _settings({"random_state": search.plan.space.seed})
        return {"algorithmName": search.plan.space.sampler, "algorithmSettings": settings}
    for parameter in search.plan.parameters:
        if parameter.log or parameter.step is not None:
            raise ExperimentError(
                f"parameters.{parameter.key}: Katib's Hyperband draws uniformly and ignores log and step; give choices,"
                " or set early_stopping to median.",
                key=f"parameters.{parameter.key}",
            )
    rounds = search.base.federation.rounds
    resource = {"r_l": rounds, "eta": REDUCTION, "resource_name": "federation.rounds"}
    return {"algorithmName": "hyperband", "algorithmSettings": _settings(resource)}


def _parallel(search: KatibSearch) -> int:
    """Return the number of parallel trials; Katib's Hyperband needs a whole bracket of them at once."""
    trials = search.plan.trials
    if not search.is_hyperband:
        return min(search.parallel or PARALLEL, trials)
    rounds = search.base.federation.rounds or 1
    needed = REDUCTION ** int(math.log(rounds) / math.log(REDUCTION))
    if (search.parallel is not None and search.parallel < needed) or trials < needed:
        raise ExperimentError(
            f"Katib's Hyperband over {rounds} rounds needs {needed} parallel trials (got "
            f"{argument('parallel')} {search.parallel or needed} and {trials} trials); raise both, lower "
            "federation.rounds, or set early_stopping to median.",
            key="parallel",
            found=search.parallel,
        )
    return search.parallel or needed


def _parameters(search: KatibSearch) -> list[Manifest]:
    listed = search.plan.space.sampler == "grid" and not search.is_hyperband
    found = [_parameter(parameter, listed=listed) for parameter in search.plan.parameters]
    if search.is_hyperband:
        ends = {"min": "1", "max": str(search.base.federation.rounds)}
        found.append({"name": "federation.rounds", "parameterType": "int", "feasibleSpace": ends})
    return found


def _parameter(parameter: Parameter, *, listed: bool) -> Manifest:
    """Return a parameter in Katib's form: finitely many values as a list, so that Katib passes the same texts."""
    if listed or parameter.choices is not None or parameter.step is not None:
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


def _template(search: KatibSearch) -> Manifest:
    keys = [parameter.key for parameter in search.plan.parameters]
    keys += ["federation.rounds"] if search.is_hyperband else []
    named = {f"parameter{i}": key for i, key in enumerate(keys, start=1)}
    parameters = [{"name": name, "description": key, "reference": key} for name, key in named.items()]
    parameters.append({"name": "trial", "description": "Name of the trial", "reference": "${trialSpec.Name}"})
    return {
        "primaryContainerName": CONTAINER,
        "successCondition": COMPLETE,
        "failureCondition": FAILED,
        "trialParameters": parameters,
        "trialSpec": _job(search, named),
    }


def _job(search: KatibSearch, named: Mapping[str, str]) -> Manifest:
    """Return the Job of a trial, which gets its values as environment variables, so that no shell interprets them."""
    s = search.cluster
    gpu = {} if s.gpu is None else {s.gpu.resource: s.gpu.count}
    image, needs = s.worker_image or s.image, resources(s.worker, gpu)
    container = container_spec(s, storage_environment(s), CONTAINER, image, [_command(search, named)], needs)
    # Katib joins command and arguments by spaces and hands them to a shell; it takes a shell's own argument as it is.
    container["command"] = ["sh", "-c"]
    values = {name.upper(): name for name in (*named, "trial")}
    container["env"] += [{"name": KATIB_FILE, "value": METRICS_PATH}]
    container["env"] += [{"name": name, "value": f"${{trialParameters.{place}}}"} for name, place in values.items()]
    container["volumeMounts"] += [{"name": "experiment", "mountPath": MOUNTED, "readOnly": True}]
    where = AggregatorPod(tolerations=s.tolerations, node_selector=s.node_selector)
    pod = pod_spec(s, container, CHECKPOINT_GRACE_S, where, s.affinity)
    pod["volumes"] += [{"name": "experiment", "configMap": {"name": search.title}}]
    annotations = {"annotations": {**s.annotations}} if s.annotations else {}
    queue = {} if s.queue_name is None else {"kueue.x-k8s.io/queue-name": s.queue_name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"labels": {**search.labels, **queue}, **annotations},  # Katib refuses empty mappings
        "spec": {
            "backoffLimit": s.retries,
            "activeDeadlineSeconds": math.ceil(s.deadline_s),
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": failure_policy("FailJob", CONTAINER, sorted({*UNRETRIED, int(ExitCode.QUORUM)})),
            "template": pod_template(s, search.labels, pod),
        },
    }


def _command(search: KatibSearch, named: Mapping[str, str]) -> str:
    """Return the shell command of a trial, relative to the pod's working folder."""
    words = ["fedloom", "run", f"{MOUNTED}/experiment.yaml"]
    for override in (*search.overrides, *search.plan.fixed):
        words += ["--set", override]
    words += ["--partition", search.partition]
    quoted = shlex.join([*words, "--no-report", "--resume"])
    quoted = quoted.replace("$", "$$")  # Kubernetes makes one of two, and would expand $(NAME)
    for name, key in named.items():
        quoted += f' --set {shlex.quote(f"{key}=")}"${name.upper()}"'
    return f'{TRACK}=katib {quoted} --out "runs/$TRIAL"'


def _settings(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]
