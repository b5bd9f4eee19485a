"""The worked examples of docs/extending.md: a method, a data source and a model from a separate package."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from facts import tells
from forked import run

from fedloom.data.datasets.binary import read_vowel

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "docs" / "examples"
EXPERIMENT = """\
name: mine
data: {dataset: people, root: DATA, partition: {scheme: natural}, held_out_fraction: 0.2, validation_fraction: 0.33}
model: {name: tanh, hidden: 16}
algorithm: {name: fedsgd, lr: 0.3}
federation: {rounds: 60, clients_per_round: 6}
evaluation: {every: 30}
runtime: {workers: 1}
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Install the examples: put their code and entry points on the path, as an installer does."""
    site = tmp_path / "site"
    about = site / "fedloom_extras-0.1.dist-info"
    about.mkdir(parents=True)
    (site / "fedloom_extras").symlink_to(EXAMPLES / "fedloom_extras")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fedloom-extras\nVersion: 0.1\n")
    points = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    return os.environ | {"PYTHONPATH": str(site)}


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """Write real measurements of people (the vowel data) in the example's own format."""
    pools = read_vowel({"Vowel.rda": (REPOSITORY / "tests" / "fixtures" / "Vowel.rda").read_bytes()})
    folder = tmp_path / "brought"
    folder.mkdir()
    with (folder / "people.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["person", "label", *(f"f{i}" for i in range(9))])
        for pool in (pools.train, pools.test):
            assert pools.owners is not None
            assert pool.owners is not None
            for x, y, owner in zip(pool.inputs, pool.labels, pool.owners, strict=True):
                writer.writerow([pools.owners.names[owner], f"vowel-{y}", *x.tolist()])
    return folder


def fedloom(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedloom", *map(str, arguments)]
    return run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_the_examples_train_in_worker_processes(environment: dict[str, str], people: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    fetched = fedloom(environment | {"FEDLOOM_DATA": str(data)}, "data", "fetch", "people", "--from", people)
    assert fetched.returncode == 0, fetched.stderr
    assert "15 owners" in fetched.stdout
    (tmp_path / "mine.yaml").write_text(EXPERIMENT.replace("DATA", str(data)))
    done = fedloom(environment, "run", tmp_path / "mine.yaml", "--no-report", "--out", out)
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["algorithm"], summary["model"], summary["dataset"]) == ("fedsgd", "tanh", "people")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert summary["global"]["accuracy_mean"] > lines[0]["global"]["accuracy_mean"] + 0.1  # of eleven classes
    assert summary["unseen"]["clients"] == 3
    secure = ("--set", "federation.secure_aggregation={}", "--set", "runtime.workers=0", "--out", tmp_path / "secure")
    done = fedloom(environment, "run", tmp_path / "mine.yaml", "--no-report", *secure)
    assert done.returncode == 0, done.stderr
    summed = json.loads((tmp_path / "secure" / "summary.json").read_text())
    assert summed["global"]["loss_mean"] == pytest.approx(summary["global"]["loss_mean"], abs=1e-4)
    assert summed["global"]["accuracy_worst"] is None


@pytest.mark.exhaustive
def test_the_example_passes_the_conformance_kit(environment: dict[str, str]) -> None:
    page = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
    found = re.search(r"`pytest (tests/conformance [^`]*)`", page)
    assert found is not None
    pytest_alone = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command = [sys.executable, *pytest_alone, *found[1].split()]
    done = run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    assert "FAILED" not in done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 20


def waits(folder: Path, **changes: Any) -> None:
    """Write waits.yaml, an experiment with the task of the example, and its table."""
    random = np.random.default_rng(0)
    with (folder / "waits.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["ward", "hour", "waiting", "minutes"])
        for ward in range(4):
            for _ in range(200):
                hour, waiting = random.uniform(0, 24), random.integers(20)
                table.writerow([f"ward-{ward}", hour, waiting, 3 * waiting + random.exponential(10 + 5 * ward)])
    source = {"path": str(folder / "waits.csv"), "label": "minutes", "client": "ward", "task": "regression"}
    experiment: dict[str, Any] = {
        "name": "waits",
        "data": {
            "dataset": "table",
            "source": source,
            "root": str(folder / "data"),
            "partition": {"scheme": "natural"},
        },
        "task": {"name": "quantile", "level": 0.8},
        "model": {"name": "mlp", "hidden": [16]},
        "algorithm": {"name": "fedavg", "local": {"epochs": 10, "lr": 0.05}, "personalize_steps": 50},
        "federation": {"rounds": 8, "clients_per_round": 4},
        "evaluation": {"every": 8},
    }
    (folder / "waits.yaml").write_text(yaml.safe_dump(experiment | changes))


@pytest.mark.slow
def test_the_example_task_trains(environment: dict[str, str], tmp_path: Path) -> None:
    waits(tmp_path)
    for workers in (0, 1):
        out = tmp_path / f"run-{workers}"
        report = "--report" if workers else "--no-report"
        done = fedloom(environment, "run", tmp_path / "waits.yaml", "--workers", workers, report, "--out", out)
        assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"run-{n}" / "summary.json").read_text()) for n in (0, 1))
    assert first["task"] == "quantile"
    assert first["headline"] == {"name": "pinball", "higher_is_better": False, "percent": False}
    assert first["seen"]["metrics"] == second["seen"]["metrics"]
    assert 0.7 < first["seen"]["metrics"]["coverage"]["mean"] < 0.9  # of level 0.8
    assert (tmp_path / "run-1" / "report.html").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"task": {"name": "quantile", "level": 2}}, ["task.level", "2"]),
        ({"task": {"name": "quantil"}}, ["task.name", "quantile", "multilabel", "quantil"]),
        ({"algorithm": {"name": "pfedgp"}}, ["pfedgp", "task"]),
    ],
)
def test_values_that_do_not_fit_the_example_task_are_rejected(
    environment: dict[str, str], tmp_path: Path, changes: dict[str, Any], facts: list[str]
) -> None:
    waits(tmp_path, **changes)
    refused = fedloom(environment, "run", tmp_path / "waits.yaml", "--out", tmp_path / "none")
    assert refused.returncode == 2
    assert tells(refused.stderr, *facts), refused.stderr
    assert not (tmp_path / "none").exists()


def test_a_faulty_example_file_is_rejected(environment: dict[str, str], people: Path, tmp_path: Path) -> None:
    text = (people / "people.csv").read_text().replace("vowel-3", "umlaut", 1)
    (people / "people.csv").write_text(text)
    data = {"FEDLOOM_DATA": str(tmp_path / "data")}
    refused = fedloom(environment | data, "data", "fetch", "people", "--from", people)
    assert refused.returncode == 3
    assert re.search(r"people.csv, line \d+: .*umlaut.*vowel-0", refused.stderr)
    assert not (tmp_path / "data" / "datasets" / "people").exists()


ODD = """\
from fedloom.tasks.regression import Regression
TAKEN = Regression()
class Kindless(Regression):
    name: str = "kindless"
    target_kind = "ranking"
KINDLESS = Kindless()
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("group", "point", "facts", "command"),
    [
        ("tasks", "odd = fedloom_odd:TAKEN", ["regression"], "schema"),
        ("tasks", "odd = fedloom_odd:KINDLESS", ["kindless", "target_kind", "multilabel"], "run its.yaml"),
        ("models", "broken = fedloom_extras.fedsgd:FEDSGD", ["FedSGD", "ModelChoice"], "run misspelt.yaml"),
        ("algorithms", "broken = fedloom_extras.nowhere:METHOD", ["ModuleNotFoundError"], "schema"),
        ("algorithms", "broken = fedloom_extras.fedsgd:NOWHERE", ["AttributeError"], "run its.yaml"),
        ("algorithms", "broken = fedloom_extras.fedsgd:NOWHERE", ["AttributeError"], "run misspelt.yaml"),
        (
            "algorithms",
            "broken = fedloom_extras.fedsgd:FedSGDSettings",
            ["ModelMetaclass", "Algorithm"],
            "run its.yaml",
        ),
    ],
)
def test_an_entry_point_that_cannot_be_registered_is_reported(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, point: str,
    facts: list[str], command: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("site/fedloom_odd.py").write_text(ODD)
    Path("site/fedloom_extras-0.1.dist-info/entry_points.txt").write_text(f"[fedloom.{group}]\n{point}\n")
    experiment = EXPERIMENT.replace("people", "vowel").replace("tanh, hidden: 16", "mlp")
    Path("its.yaml").write_text(experiment.replace("fedsgd, lr: 0.3", "broken"))
    Path("misspelt.yaml").write_text(experiment.replace("fedsgd", "fedavgg"))
    refused = fedloom(environment, *command.split())
    assert refused.returncode == 2
    where = f"fedloom.{group}" if group == "tasks" else f"fedloom.{group}: {point} (package fedloom-extras)"
    assert tells(refused.stderr, where, *facts), refused.stderr


def test_a_dataset_that_cannot_be_imported_is_reported(environment: dict[str, str], tmp_path: Path) -> None:
    points = tmp_path / "site" / "fedloom_extras-0.1.dist-info" / "entry_points.txt"
    points.write_text("[fedloom.datasets]\nbroken = fedloom_extras.nowhere:THING\n")
    refused = fedloom(environment, "data", "fetch", "people")
    assert refused.returncode == 2
    where = "fedloom.datasets: broken = fedloom_extras.nowhere:THING (package fedloom-extras) cannot be loaded"
    assert where in refused.stderr


def test_the_page_shows_the_current_files() -> None:
    page = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    files = [path.read_text(encoding="utf-8") for path in sorted((EXAMPLES / "fedloom_extras").glob("*.py"))]
    assert blocks
    for block in blocks:
        assert any(block in file for file in files), f"docs/extending.md shows code that is in no example:\n{block}"
