"""The search on Katib of docs/search.md: its objects, a trial's command as a process, and the lines of the tracker.

Expectations about Katib are those of its sources of June 2026 (kubeflow/katib 33c8ff4), whose files the tests name.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml
from fake_cluster.kubelet import expand
from forked import run
from jsonschema import Draft202012Validator
from s3_support import S3Server
from vowel_data import vowel_root

import fedloom
from fedloom.cluster.manifests import UNRETRIED
from fedloom.errors import ExitCode
from fedloom.experiment import parse_experiment
from fedloom.experiment.search_space import plan_search, read_space
from fedloom.storage import open_store
from fedloom.tasks.names import METRICS
from fedloom.trackers.katib import METRICS_PATH, Katib, katib_lines, objective_name
from fedloom.tuning.trials import STARTUP, Schedule

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "examples" / "katib" / "search.yaml").read_text()
CONFIG, EXPERIMENT = yaml.safe_load_all(TEXT)
SPEC = EXPERIMENT["spec"]
VALUES = {"algorithm.local.lr": "0.3", "algorithm.local.epochs": "1", "model.hidden": "[16]"}
BUCKET = "s3://bucket/fedloom"
SMALL = {"rounds: 150": "rounds: 3", "every: 10": "every: 1", "personalize_steps: 100": "personalize_steps: 5"}
LONG = SMALL | {"rounds: 150": "rounds: 3000"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of a mapping that has these keys alone."""
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": [*values]}


STRING, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
STRINGS = {"type": "array", "items": STRING, "minItems": 1, "uniqueItems": True}
SETTINGS = {"type": "array", "items": closed("name", "value", name=STRING, value=STRING)}
STRATEGY = closed("name", "value", name=STRING, value=one_of("min", "max", "latest"))
NUMBERS = closed(
    "min", "max", min=STRING, max=STRING, step=STRING, distribution=one_of("uniform", "logUniform", "normal")
)
PARAMETER = {
    "oneOf": [
        closed("name", "feasibleSpace", name=STRING, parameterType=one_of("int", "double"), feasibleSpace=NUMBERS),
        closed(
            "name", "feasibleSpace", name=STRING, parameterType=one_of("categorical", "discrete"),
            feasibleSpace=closed("list", list=STRINGS),
        ),
    ]
}  # fmt: skip
FILE = closed(
    "path", "kind", "format", path={"pattern": "^/"}, kind={"const": "File"}, format=one_of("TEXT", "JSON")
)  # fmt: skip
SCHEMA = closed(
    "objective", "algorithm", "trialTemplate", "parameters", "metricsCollectorSpec",
    objective=closed(
        "type", "objectiveMetricName", type=one_of("minimize", "maximize"), goal={"type": "number"},
        objectiveMetricName=STRING, additionalMetricNames=STRINGS,
        metricStrategies={"type": "array", "items": STRATEGY},
    ),
    algorithm=closed("algorithmName", algorithmName=STRING, algorithmSettings=SETTINGS),
    earlyStopping=closed("algorithmName", algorithmName=STRING, algorithmSettings=SETTINGS),
    parallelTrialCount=COUNT, maxTrialCount=COUNT, maxFailedTrialCount=COUNT,
    parameters={"type": "array", "items": PARAMETER},
    metricsCollectorSpec=closed(
        "collector", "source", collector=closed("kind", kind={"const": "File"}),
        source=closed("fileSystemPath", fileSystemPath=FILE),
    ),
    trialTemplate=closed(
        "primaryContainerName", "trialParameters", "trialSpec", primaryContainerName=STRING, retain={"type": "boolean"},
        successCondition=STRING, failureCondition=STRING, trialSpec={"type": "object"},
        trialParameters={
            "type": "array", "items": closed("name", "reference", name=STRING, reference=STRING, description=STRING)
        },
    ),
)  # fmt: skip
"""Keys and values of a ``spec`` whose metrics are in a file (``pkg/apis/controller/{experiments,common}/v1beta1``).

Katib's custom resource itself accepts every key, and its controller ignores unknown ones.
"""


def job_of(values: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return a trial's Job, with values in the JSON text of the template (``experiment/manifest/generator.go``)."""
    text = json.dumps(SPEC["trialTemplate"]["trialSpec"])
    for parameter in SPEC["trialTemplate"]["trialParameters"]:
        value = name if parameter["reference"] == "${trialSpec.Name}" else values[parameter["reference"]]
        text = text.replace(f"${{trialParameters.{parameter['name']}}}", value)
    job: dict[str, Any] = json.loads(text)
    return {**job, "metadata": {"name": name}}


def empty(value: Any) -> bool:
    """Return True if a value contains an empty mapping, list or text, other than an ``emptyDir``."""
    if isinstance(value, dict):
        return not value or any(empty(item) for key, item in value.items() if key != "emptyDir")
    return value in ([], "") or (isinstance(value, list) and any(map(empty, value)))


def test_kubernetes_accepts_the_objects() -> None:
    job = job_of(VALUES, "vowel-search-abcde")
    kubernetes_schemas.check(CONFIG, job)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"fedloom/aggregator:{fedloom.__version__}"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["volumes"][-1]["configMap"] == {"name": CONFIG["metadata"]["name"]}
    codes = job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert codes["containerName"] == container["name"]
    assert codes["values"] == sorted({*UNRETRIED, int(ExitCode.QUORUM)})


def test_katibs_rules_are_kept() -> None:
    """See ``pkg/webhook/v1beta1/experiment/validator``; its check of the Job refuses empty values, which Go omits."""
    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(SPEC)] == []
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", EXPERIMENT["metadata"]["name"])
    assert len(EXPERIMENT["metadata"]["name"]) <= 40
    assert max(SPEC["parallelTrialCount"], SPEC["maxFailedTrialCount"]) <= SPEC["maxTrialCount"]
    objective, template = SPEC["objective"], SPEC["trialTemplate"]
    assert [strategy["name"] for strategy in objective["metricStrategies"]] == [objective["objectiveMetricName"]]
    names = [parameter["name"] for parameter in template["trialParameters"]]
    references = [parameter["reference"] for parameter in template["trialParameters"]]
    assert len({*names}) == len({*references}) == len(names)
    assert {*references} == {parameter["name"] for parameter in SPEC["parameters"]} | {"${trialSpec.Name}"}
    assert {*re.findall(r"\$\{trialParameters\.(.+?)\}", json.dumps(template["trialSpec"]))} == {*names}
    job = template["trialSpec"]
    assert (job["apiVersion"], job["kind"], job.get("metadata")) == ("batch/v1", "Job", None)
    assert not empty(job)
    assert template["primaryContainerName"] == job["spec"]["template"]["spec"]["containers"][0]["name"]


def test_experiment_and_search_space_are_valid() -> None:
    text = CONFIG["data"]["experiment.yaml"]
    experiment = parse_experiment(text)
    changes = [f"storage={BUCKET}", "evaluation.every=10"]
    assert experiment == parse_experiment((ROOT / "experiments" / "vowel.yaml").read_text(), changes)
    parameters: dict[str, Any] = {}
    for parameter in SPEC["parameters"]:
        space = {key: yaml.safe_load(str(value)) for key, value in parameter["feasibleSpace"].items() if key != "list"}
        log = space.pop("distribution", "uniform") == "logUniform"
        choices = [yaml.safe_load(value) for value in parameter["feasibleSpace"].get("list", ())]
        parameters[parameter["name"]] = {"choices": choices} if choices else {**space, "log": log}
    assert parameters.keys() == VALUES.keys()
    searched = {"parameters": parameters, "early_stopping": "median"}
    plan = plan_search(read_space(searched), lambda overrides: parse_experiment(text, overrides))
    assert SPEC["maxTrialCount"] == plan.trials
    stopping = {setting["name"]: int(setting["value"]) for setting in SPEC["earlyStopping"]["algorithmSettings"]}
    warm_up = Schedule(experiment.federation.rounds, experiment.evaluation.every).warm_up
    assert stopping == {"min_trials_required": STARTUP, "start_step": warm_up}
    assert SPEC["objective"]["objectiveMetricName"] == objective_name(METRICS["accuracy"])
    assert SPEC["objective"]["type"] == "maximize"
    assert SPEC["metricsCollectorSpec"]["source"]["fileSystemPath"]["path"] == METRICS_PATH


def collected(text: str, *names: str) -> list[tuple[str, float]]:
    """Return what the collector reads (``file-metricscollector.go``); a time that it cannot parse is an error here.

    Katib itself would record such a line with the year 1, and early stopping ends at a value that is no number.
    """
    values = []
    for line in text.split("\n"):
        if not any(name in line for name in names):
            continue
        time, _, rest = line.partition(" ")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", time)  # time.RFC3339Nano
        assert rest
        found = re.findall(r"([\w|-]+)\s*=\s*([+-]?\d*(?:\.\d+)?(?:[Ee][+-]?\d+)?)", line, re.ASCII)  # DefaultFilter
        values += [(name, float(value)) for name, value in found if name in names]
    return values


def test_katibs_collector_reads_the_trackers_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker leaves out the evaluation before training, test results, and values that are not finite."""
    assert objective_name(METRICS["rmse"]) == "validation_rmse"
    headline = {"headline": {"name": "rmse", "higher_is_better": False, "percent": False}}
    values = [0.5, 1e-7, 123456789.0, 3e22, -1.0]
    monkeypatch.setenv("FEDLOOM_KATIB_FILE", str(tmp_path / "katib" / "metrics.log"))
    tracker = Katib(tmp_path)
    for number, value in enumerate(values):
        numbers = {"validation_pooled": value, "validation_loss": 9.0, "privacy": {"epsilon": value / 2}}
        tracker.evaluated({"round": number, **numbers, **headline, "seen": {"rmse_mean": 0.77}})
    written = (tmp_path / "katib" / "metrics.log").read_text()
    expected = [(name, number) for value in values[1:] for name, number in _numbers(value)]
    assert collected(written, "validation_rmse", "epsilon") == expected
    for unknown in (None, float("nan"), float("inf")):
        line = {"round": 3, "validation_pooled": unknown, "validation_loss": None, "privacy": {"epsilon": unknown}}
        assert list(katib_lines({**line, **headline})) == []


def _numbers(value: float) -> list[tuple[str, float]]:
    return [("validation_rmse", value), ("epsilon", value / 2)]


@pytest.fixture
def storage(tmp_path: Path, s3_server: S3Server) -> str:
    """Return a store with the partition of the trials."""
    url, file = f"s3://{s3_server.new_bucket()}/team", str(ROOT / "experiments" / "vowel.yaml")
    words = ["-m", "fedloom", "partition", file, "--set", f"data.root={vowel_root(tmp_path / 'data')}"]
    done = run(
        [sys.executable, *words, "--out", f"{url}/partitions/vowel"],
        env={**os.environ, **s3_server.environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return url


class Container:
    """A trial's container as a process: its mounts are folders, and Katib's webhook has wrapped its command.

    The part that looks for a recorded stop is there only with a rule for early stopping (``pkg/webhook/v1beta1/pod``).
    """

    def __init__(
        self, storage: str, server: S3Server, folder: Path, changes: Mapping[str, str], *, stops: bool = False
    ) -> None:
        (spec,) = job_of(VALUES, "vowel-a")["spec"]["template"]["spec"]["containers"]
        self.metrics, self.work = folder / "katib" / "metrics.log", folder / "work"
        for path in (self.metrics.parent, self.work):
            path.mkdir(parents=True)
        text = CONFIG["data"]["experiment.yaml"].replace(BUCKET, storage)
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (folder / "experiment.yaml").write_text(text)
        end = f"$$$$.pid && [ $(head -n 1 {self.metrics.parent}/$$.pid) = early-stopped ]"
        early = f"|| if test -f {self.metrics.parent}/{end}; then echo Stopped; else echo Failed; exit 1; fi"
        words = [*spec["args"], *([early] if stops else []), f"&& echo completed > {self.metrics.parent}/$$$$.pid"]
        values = {entry["name"]: entry["value"] for entry in spec["env"]}
        line = expand(" ".join(words), values).replace(BUCKET, storage)
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environment |= {**values, **server.environment, "HOME": str(self.work)}
        environment |= {"FEDLOOM_KATIB_FILE": str(self.metrics), "FEDLOOM_TELL_PARENT": str(folder / "told")}
        self.log = folder / "log"
        with self.log.open("wb") as log:
            command = [*spec["command"], line.replace("/etc/fedloom", str(folder))]
            self.process = subprocess.Popen(command, env=environment, cwd=self.work, stdout=log, stderr=log)

    @property
    def marks(self) -> list[str]:
        """Return the records of the shell, or of the collector, about the end."""
        return [path.read_text().strip() for path in self.metrics.parent.glob("*.pid")]

    def read(self) -> list[float]:
        """Return the values of the objective that the collector reads."""
        name = SPEC["objective"]["objectiveMetricName"]
        text = self.metrics.read_text() if self.metrics.exists() else ""
        return [value for _, value in collected(text, name)]

    def terminate(self) -> None:
        """Terminate the shell's only child, as the collector does (``cmd/metricscollector``)."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)


@pytest.mark.slow
def test_a_trial_reports_each_round(storage: str, tmp_path: Path, s3_server: S3Server) -> None:
    trial = Container(storage, s3_server, tmp_path / "a", SMALL)
    assert trial.process.wait(120) == 0, trial.log.read_text()
    assert trial.marks == ["completed"]
    trained = fedloom.load(trial.work / "runs" / "vowel-a")
    assert list(trained.experiment.model.hidden) == [16]
    assert trained.experiment.algorithm.settings.local.lr == 0.3
    assert trained.experiment.algorithm.settings.local.epochs == 1
    lines = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    by_round = [line["validation_pooled"] for line in lines if line["round"] > 0]
    assert trial.read() == by_round
    assert len(by_round) == 3
    published = open_store(f"{storage}/runs/vowel-a", s3_server.environment)
    assert "summary.json" in {entry.name for entry in published.entries()}


@pytest.mark.slow
def test_a_trial_can_be_stopped_early_and_its_pod_replaced(storage: str, tmp_path: Path, s3_server: S3Server) -> None:
    """A trial that the collector terminates has succeeded if the collector recorded it before, and else has failed."""
    killed = Container(storage, s3_server, tmp_path / "a", LONG, stops=True)
    until(lambda: len(killed.read()) >= 3, killed)
    killed.terminate()
    assert killed.process.wait(60) == 1
    assert killed.marks == []
    # The next pod has an empty folder for the metrics: it gets those of the earlier rounds again.
    stopped = Container(storage, s3_server, tmp_path / "b", LONG, stops=True)
    until(lambda: len(stopped.read()) > len(killed.read()), stopped)
    (stopped.metrics.parent / f"{stopped.process.pid}.pid").write_text("early-stopped")
    stopped.terminate()
    assert stopped.process.wait(60) == 0
    assert stopped.marks == ["completed"]
    assert "resuming round" in stopped.log.read_text()
    assert stopped.read()[: len(killed.read())] == killed.read()
    assert not fedloom.load(stopped.work / "runs" / "vowel-a").finished


def until(condition: Callable[[], object], container: Container) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert container.process.poll() is None, container.log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
