"""Stand-in for Katib, which handles an Experiment as its sources of June 2026 (33c8ff4) do.

Its custom resource has no schema: a webhook checks it (``pkg/webhook/v1beta1/experiment/validator``), another one
wraps a trial's command in a shell (``pkg/webhook/v1beta1/pod``), a suggestion service draws values
(``pkg/suggestion/v1beta1``), and a collector reads the metrics (``pkg/metricscollector/v1beta1``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import optuna

Object = dict[str, Any]

DEFAULT_FILTER = re.compile(r"([\w|-]+)\s*=\s*([+-]?\d*(\.\d+)?([Ee][+-]?\d+)?)")
"""Default filter of the collector: a metric's name and its value."""

FIELDS = {
    "objective": {"type", "goal", "objectiveMetricName", "additionalMetricNames", "metricStrategies"},
    "algorithm": {"algorithmName", "algorithmSettings"},
    "earlyStopping": {"algorithmName", "algorithmSettings"},
    "trialTemplate": {
        "retain", "trialSpec", "configMap", "trialParameters", "primaryPodLabels", "primaryContainerName",
        "successCondition", "failureCondition",
    },
    "metricsCollectorSpec": {"source", "collector"},
    "parameters": {"name", "parameterType", "feasibleSpace"},
}  # fmt: skip
OTHERS = {"parallelTrialCount", "maxTrialCount", "maxFailedTrialCount", "resumePolicy", "nasConfig"}
ALGORITHMS = {
    "random": {"random_state"},
    "tpe": {"random_state", "gamma", "prior_weight", "n_EI_candidates"},
    "grid": {"random_state"},
}
"""Settings of the algorithms that its stock configuration has, and that we use."""


class Metric(NamedTuple):
    """A line of the metrics file, as the collector reports it."""

    time: str
    name: str
    value: float


def refusals(experiment: Object) -> list[str]:
    """Return the errors for which Katib would reject an Experiment."""
    return [*_of_spec(experiment), *_of_parameters(experiment["spec"]), *_of_template(experiment["spec"])]


def _of_spec(experiment: Object) -> Iterator[str]:
    name, spec = experiment["metadata"]["name"], experiment["spec"]
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 40:
        yield f"metadata.name: {name}"
    if (experiment["apiVersion"], experiment["kind"]) != ("kubeflow.org/v1beta1", "Experiment"):
        yield "apiVersion, kind"
    if unknown := spec.keys() - FIELDS.keys() - OTHERS:
        yield f"spec: unknown {unknown}"
    for section, known in FIELDS.items():
        for part in spec.get(section) if section == "parameters" else filter(None, [spec.get(section)]):
            if unknown := part.keys() - known:
                yield f"{section}: unknown {unknown}"
    parallel, most, failed = (spec[f"{key}TrialCount"] for key in ("parallel", "max", "maxFailed"))
    if not 0 < parallel <= most or not 0 <= failed <= most:
        yield f"counts: {parallel}, {most}, {failed}"
    objective = spec["objective"]
    names = [objective["objectiveMetricName"], *objective.get("additionalMetricNames", ())]
    if objective["type"] not in ("maximize", "minimize") or len(set(names)) < len(names) or not all(names):
        yield f"objective: {objective}"
    for strategy in objective["metricStrategies"]:
        if strategy["name"] not in names or strategy["value"] not in ("min", "max", "latest"):
            yield f"metricStrategies: {strategy}"
    algorithm = settings_of(spec["algorithm"])
    if algorithm.keys() - ALGORITHMS[spec["algorithm"]["algorithmName"]]:
        yield f"algorithm: {algorithm}"
    if (early := spec.get("earlyStopping")) is not None:
        found = settings_of(early)
        if early["algorithmName"] != "medianstop" or found.keys() - {"min_trials_required", "start_step"}:
            yield f"earlyStopping: {early}"
        if not all(int(value) >= 1 for value in found.values()):
            yield f"earlyStopping: {found}"
    path = spec["metricsCollectorSpec"]["source"]["fileSystemPath"]
    if spec["metricsCollectorSpec"]["collector"] != {"kind": "File"} or path["kind"] != "File":
        yield "metricsCollectorSpec: a file collector reads a file"
    if not path["path"].startswith("/") or path["format"] not in ("TEXT", "JSON"):
        yield f"fileSystemPath: {path}"


def _of_parameters(spec: Object) -> Iterator[str]:
    for parameter in spec["parameters"]:
        kind, space = parameter["parameterType"], parameter["feasibleSpace"]
        if not all(isinstance(value, str) for key, value in space.items() if key != "list"):
            yield f"{parameter['name']}: values are texts"
        if kind in ("int", "double"):
            if (
                "list" in space
                or not space.get("min")
                or not space.get("max")
                or float(space["min"]) > float(space["max"])
            ):
                yield f"{parameter['name']}: {space}"
            if space.get("distribution", "uniform") not in ("uniform", "logUniform", "normal", "logNormal"):
                yield f"{parameter['name']}: {space}"
        elif kind in ("categorical", "discrete"):
            values = space.get("list", [])
            texts = all(isinstance(value, str) for value in values)
            if space.keys() != {"list"} or not values or len(set(values)) < len(values) or not texts:
                yield f"{parameter['name']}: {space}"
        else:
            yield f"{parameter['name']}: {kind}"


def _of_template(spec: Object) -> Iterator[str]:
    template, names = spec["trialTemplate"], [parameter["name"] for parameter in spec["parameters"]]
    for key in ("primaryContainerName", "successCondition", "failureCondition", "trialParameters", "trialSpec"):
        if not template.get(key):
            yield f"trialTemplate.{key}"
    given, references = [], []
    for parameter in template["trialParameters"]:
        given.append(parameter["name"])
        references.append(parameter["reference"])
        place = f"${{trialParameters.{parameter['name']}}}"
        if re.search(r"[{}]", parameter["name"]) or place not in json.dumps(template):
            yield f"trialParameters: {parameter}"
        if parameter["reference"] not in names and not re.fullmatch(r"\$\{trialSpec\.\w+\}", parameter["reference"]):
            yield f"trialParameters: {parameter}"
    if len(set(given)) < len(given) or len(set(references)) < len(references) or set(names) - set(references):
        yield f"trialParameters: {given}, {references}"
    used = set(re.findall(r"\$\{trialParameters\.(.+?)\}", json.dumps(template["trialSpec"])))
    if used != set(given):
        yield f"trialSpec uses {used}"
    job = template["trialSpec"]
    if job["metadata"].keys() & {"name", "namespace"}:
        yield "trialSpec.metadata: name and namespace must be omitted"
    # Katib converts the Job to its own type and back, which drops empty mappings and texts: they are ignored here.
    yield from (f"trialSpec: {place} is empty" for place in _empty(job) if not place.endswith(".emptyDir"))
    containers = [container["name"] for container in job["spec"]["template"]["spec"]["containers"]]
    if template["primaryContainerName"] not in containers:
        yield f"primaryContainerName: {containers}"


def _empty(value: Any, place: str = "") -> Iterator[str]:
    if value in ({}, [], ""):
        yield place
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _empty(item, f"{place}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from _empty(item, place)


def settings_of(algorithm: Object) -> dict[str, str]:
    """Return the settings of an algorithm by name."""
    return {setting["name"]: setting["value"] for setting in algorithm["algorithmSettings"]}


class Suggestions:
    """Suggestion service that samples by Optuna: for ``grid``, and for ``random`` if it is configured so."""

    def __init__(self, spec: Object) -> None:
        seed = int(settings_of(spec["algorithm"])["random_state"])
        self._parameters = spec["parameters"]
        if spec["algorithm"]["algorithmName"] == "grid":
            values = {parameter["name"]: parameter["feasibleSpace"]["list"] for parameter in self._parameters}
            sampler: optuna.samplers.BaseSampler = optuna.samplers.GridSampler(values, seed=seed)
        else:
            sampler = optuna.samplers.RandomSampler(seed=seed)
        self._study = optuna.create_study(sampler=sampler, direction=spec["objective"]["type"])

    def ask(self) -> dict[str, str]:
        """Return the assignments of the next trial: texts by parameter."""
        found = self._study.ask(fixed_distributions={p["name"]: self._values(p) for p in self._parameters})
        return {name: str(value) for name, value in found.params.items()}

    @staticmethod
    def _values(parameter: Object) -> optuna.distributions.BaseDistribution:
        space, log = parameter["feasibleSpace"], parameter["feasibleSpace"].get("distribution") == "logUniform"
        if parameter["parameterType"] == "int":
            return optuna.distributions.IntDistribution(int(space["min"]), int(space["max"]), log=log)
        if parameter["parameterType"] == "double":
            return optuna.distributions.FloatDistribution(float(space["min"]), float(space["max"]), log=log)
        return optuna.distributions.CategoricalDistribution(space["list"])


def trial_job(spec: Object, name: str, assignments: Mapping[str, str]) -> Object:
    """Return the Job of a trial, with values in place of the parameters in the template's JSON text."""
    template = spec["trialTemplate"]
    text = json.dumps(template["trialSpec"])
    for parameter in template["trialParameters"]:
        is_name = parameter["reference"] == "${trialSpec.Name}"
        value = name if is_name else assignments[parameter["reference"]]
        text = text.replace(f"${{trialParameters.{parameter['name']}}}", value)
    job: Object = json.loads(text)
    job["metadata"]["name"] = name
    return job


def wrap(job: Object, spec: Object, *, stops: bool) -> None:
    """Wrap the trial's command in a shell that records its end, and mount the folder of the metrics."""
    pod = job["spec"]["template"]["spec"]
    (container,) = (c for c in pod["containers"] if c["name"] == spec["trialTemplate"]["primaryContainerName"])
    folder = str(Path(spec["metricsCollectorSpec"]["source"]["fileSystemPath"]["path"]).parent)
    words = [*container["command"], *container["args"]]
    words = words[2:] if words[:2] in (["sh", "-c"], ["bash", "-c"]) else words
    if stops:
        # $$$$ is one that Kubernetes has unescaped to the shell's own $$
        words += ["||", f"if test -f {folder}/$$$$.pid && [ $(head -n 1 {folder}/$$.pid) = early-stopped ]; then"]
        words += ["echo Training Container was Early Stopped; else echo Training Container was Failed; exit 1; fi"]
    words += ["&&", f"echo completed > {folder}/$$$$.pid"]
    container["command"], container["args"] = ["sh", "-c"], [" ".join(words)]
    container["volumeMounts"].append({"name": "metrics-volume", "mountPath": folder})
    pod["volumes"].append({"name": "metrics-volume", "emptyDir": {}})


def collected(text: str, metrics: Sequence[str]) -> list[Metric]:
    """Return the collector's metrics of a file: lines that begin with a time, and values of these metrics."""
    found = []
    for line in text.splitlines():
        if not any(name in line for name in metrics):
            continue
        time = line.partition(" ")[0]
        datetime.fromisoformat(time)
        for name, value, *_ in DEFAULT_FILTER.findall(line):
            if name in metrics:
                found.append(Metric(time, name, float(value)))
    return found
