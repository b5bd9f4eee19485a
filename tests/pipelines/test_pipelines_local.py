"""The pipelines from end to end on real data, by `fedloom pipeline local`, compared with the single commands."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from facts import tells
from forked import Popen
from run_processes import ENVIRONMENT, FEDLOOM, WAIT_S, alive, children, ended, experiment, fedloom, started, until

from fedloom.cluster.manifests import identity
from fedloom.data.manifest import read_manifest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.group("pipelines"),
]

FEDAVG = "algorithm={name: fedavg, local: {steps: 5, batch_size: 16, lr: 0.02}, personalize_steps: 5}"
TIMES = {"duration_s", "client_steps_per_s", "digest"}


def summary(run: Path) -> dict[str, Any]:
    """Return a summary without times."""
    return {key: value for key, value in json.loads((run / "summary.json").read_text()).items() if key not in TIMES}


def metadata(out: Path, task: str, artifact: str) -> dict[str, Any]:
    """Return the metadata that Kubeflow stores beside an artifact's files."""
    reported = json.loads((out / task / "executor_output.json").read_text())["artifacts"]
    return dict(reported[artifact]["artifacts"][0]["metadata"])


@pytest.fixture(scope="module")
def personalized(small_run: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of the small experiment's pipeline."""
    out = tmp_path_factory.mktemp("pipeline") / "out"
    command = [*FEDLOOM, "pipeline", "local", "personalized_federation", str(small_run[0]), "--out", str(out), "--json"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["run"] == str(out / "run")
    return out


def test_the_run_equals_that_of_fedloom_run(personalized: Path, small_run: tuple[Path, Path]) -> None:
    bare, run = small_run[1], personalized / "run"
    assert summary(run) == summary(bare)
    names = [path.name for path in sorted((bare / "checkpoints").glob("*.safetensors"))]
    assert names
    for name in names:
        assert (run / "checkpoints" / name).read_bytes() == (bare / "checkpoints" / name).read_bytes()
    for name in ("clients.csv", "confusion.json", "partition.json", "experiment.yaml"):
        assert (run / name).read_bytes() == (bare / name).read_bytes(), name


def test_artifacts_and_their_metadata(personalized: Path, small_run: tuple[Path, Path]) -> None:
    manifest, found = read_manifest(personalized / "partition" / "shards"), summary(small_run[1])
    shards = metadata(personalized, "partition", "shards")
    assert (shards["fingerprint"], shards["clients"], shards["unseen_clients"]) == (manifest.fingerprint, 20, 2)
    files = metadata(personalized, "fetch", "files")
    assert files["dataset"] == "fashion-mnist"
    assert files["bytes"] > 10**7
    model = metadata(personalized, "federate", "model")
    assert (model["algorithm"], model["seed"], model["rounds"]) == ("pefll", 5, 4)
    assert model["best_round"] == found["best"]["round"]
    assert model["unseen_accuracy_mean"] == found["unseen"]["accuracy_mean"]
    assert metadata(personalized, "federate", "metrics")["seen_accuracy_pooled"] == found["seen"]["accuracy_pooled"]
    assert json.loads((personalized / "federate" / "metrics").read_text())["seen"] == found["seen"]


def test_the_evaluation_is_real_and_agrees_with_the_run(personalized: Path, small_run: tuple[Path, Path]) -> None:
    found, measured = summary(small_run[1]), json.loads((personalized / "evaluate" / "metrics").read_text())
    assert {key: measured[key] for key in ("seen", "unseen", "global")} == {
        key: found[key] for key in ("seen", "unseen", "global")
    }
    matrix = metadata(personalized, "evaluate", "confusion")["confusionMatrix"]
    total = sum(sum(row["row"]) for row in matrix["rows"])
    assert total == sum(client.test for client in read_manifest(personalized / "partition" / "shards").clients)
    right = sum(row["row"][label] for label, row in enumerate(matrix["rows"]))
    of_groups = sum(found[g]["accuracy_pooled"] * 20 * found[g]["clients"] for g in ("seen", "unseen"))
    assert right == pytest.approx(of_groups)


def test_page_and_table(personalized: Path, small_run: tuple[Path, Path]) -> None:
    page = (personalized / "report.html").read_text()
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert "<script src" not in page
    assert 'href="http' not in page
    table = (personalized / "report.md").read_text()
    accuracy = 100 * summary(small_run[1])["unseen"]["accuracy_mean"]
    (line,) = [line for line in table.splitlines() if line.startswith("| unseen |")]
    assert f"| 2 | {accuracy:.1f} ± " in line


def test_new_clients_get_their_models_by_algorithm_1_alone(
    personalized: Path, small_run: tuple[Path, Path], tmp_path: Path
) -> None:
    common = ("--set", "seed=9", "--set", "data.partition.clients=10")
    out, run = tmp_path / "out", personalized / "run"
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    fedloom("pipeline", "local", "unseen_clients", small_run[0], *common, "--param", f"model={run}", "--out", out)
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before
    fedloom("partition", small_run[0], *common, "--out", tmp_path / "fresh")
    fedloom("evaluate", run, "--partition", tmp_path / "fresh", "--out", tmp_path / "bare.json")
    bare, found = (json.loads(p.read_text()) for p in (tmp_path / "bare.json", out / "evaluate" / "metrics"))
    assert found == bare
    assert found["seen"] is None
    assert found["unseen"]["clients"] == 10
    clients = list(csv.DictReader((out / "evaluate" / "evaluation" / "clients.csv").read_text().splitlines()))
    assert len(clients) == 10
    assert "Learning curves" in (out / "report.html").read_text()
    assert "| seen |" not in (out / "report.md").read_text()


def test_new_clients_get_their_models_from_a_server(small_run: tuple[Path, Path], tmp_path: Path) -> None:
    """They get the models that an evaluation of the served checkpoint gives; a server of another run is rejected."""
    common = ("--set", "seed=9", "--set", "data.partition.clients=10")
    path, run = small_run
    asked = ("pipeline", "local", "unseen_clients", path, *common, "--param", f"model={run}")
    with started("serve", run, "--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        at = next(line for line in process.stdout if "serving models of" in line).split()[-1]
        fedloom(*asked, "--param", f"serve={at}", "--out", tmp_path / "out")
        other = shutil.copytree(run, tmp_path / "other")
        tree = yaml.safe_load((other / "experiment.yaml").read_text())
        (other / "experiment.yaml").write_text(yaml.safe_dump({**tree, "name": "another"}))
        output = fedloom(*asked[:-1], f"model={other}", "--param", f"serve={at}", "--out", tmp_path / "refused", code=3)
        assert tells(output, at, "small", "another")
        process.terminate()
    fedloom("partition", path, *common, "--out", tmp_path / "fresh")
    fedloom("evaluate", run, "--partition", tmp_path / "fresh", "--out", tmp_path / "bare.json")
    bare, found = (
        json.loads(p.read_text()) for p in (tmp_path / "bare.json", tmp_path / "out" / "evaluate" / "metrics")
    )
    assert found.pop("served") == {"by": at, "rounds": [bare["round"]]}
    assert found == {key: bare[key] for key in found}
    assert (found["seen"], found["unseen"]["clients"]) == (None, 10)
    assert "| unseen |" in (tmp_path / "out" / "report.md").read_text()


FEDERATE = """
import json, sys
from pathlib import Path
from fedloom.kubeflow.steps import federate_task
from fedloom import experiment
file, shards, out, storage = sys.argv[1:]
text = json.dumps(experiment.load_experiment(file, [f"storage={storage}"]).model_dump(mode="json"))
federate_task(text, Path(shards), Path(out), backend="local", cluster="", storage_secret="", run_id="run",
              task="federate", task_config=None)
"""


def test_a_task_whose_pod_was_killed_resumes_from_its_store(
    small_run: tuple[Path, Path], personalized: Path, tmp_path: Path
) -> None:
    """A pod's folder is lost with it; the rounds of the earlier attempt are in the store, separate from other runs."""
    shards, claim = personalized / "partition" / "shards", tmp_path / "claims" / "shared"
    claim.mkdir(parents=True)

    def attempt(out: str) -> subprocess.Popen[bytes]:
        arguments = [small_run[0], shards, tmp_path / out / "model", "pvc://shared/fed"]
        environment = {**os.environ, **ENVIRONMENT, "FEDLOOM_CLAIMS": str(claim.parent)}
        return Popen([sys.executable, "-c", FEDERATE, *map(str, arguments)], env=environment)

    with attempt("first") as first:
        until(lambda: list(claim.glob("fed/runs/*/published/*")), "a published round")
        for pid in (*children(first.pid), first.pid):
            os.kill(pid, signal.SIGKILL)
    (published,) = claim.glob("fed/runs/*")
    assert published.name == f"small-{identity('run', 'federate')}"
    with attempt("second") as second:
        assert second.wait(WAIT_S) == 0
    run = tmp_path / "second" / "model"
    assert summary(run) == summary(small_run[1])
    assert (published / "summary.json").read_bytes() == (run / "summary.json").read_bytes()


def test_methods_times_seeds(small_run: tuple[Path, Path], tmp_path: Path) -> None:
    out, sweep = tmp_path / "out", tmp_path / "sweep"
    methods = ("--param", "methods=", "--param", f"methods={FEDAVG}", "--param", "seeds=1-2")
    output = fedloom("pipeline", "local", "compare_methods", small_run[0], *methods, "--out", out)
    assert "FedAvg + fine-tuning" in output
    pefll = "algorithm=" + json.dumps(yaml.safe_load(small_run[0].read_text())["algorithm"])
    grid = f"{pefll},{FEDAVG.removeprefix('algorithm=')}"
    fedloom("run", small_run[0], "--seeds", "1-2", "--grid", grid, "--out", sweep)
    bare = {(s["algorithm"], s["seed"]): s for s in (summary(p.parent) for p in sweep.glob("*/summary.json"))}
    runs = {(s["algorithm"], s["seed"]): s for s in (summary(run) for run in (out / "runs").iterdir())}
    assert len(runs) == 4
    assert runs == bare
    rows = list(csv.DictReader((out / "compare" / "files" / "compare.csv").read_text().splitlines()))
    of_sweep = list(csv.DictReader((sweep / "comparison" / "compare.csv").read_text().splitlines()))
    means = {row["label"]: (row["n_seeds"], row["seen_accuracy"], row["seen_accuracy_std"]) for row in rows}
    assert {row["label"]: means[row["label"]] for row in of_sweep} == {
        row["label"]: (row["n_seeds"], row["seen_accuracy"], row["seen_accuracy_std"]) for row in of_sweep
    }
    table = (out / "compare.md").read_text()
    pooled = next(row for row in rows if row["method"] == "PeFLL")
    mean, std = 100 * float(pooled["unseen_accuracy"]), 100 * float(pooled["unseen_accuracy_std"])
    assert f"{mean:.1f} ± {std:.1f}" in table
    assert "PeFLL" in (out / "compare.html").read_text()


def test_errors_are_reported_before_any_work(small_run: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("pipeline", "local", "personalized_federation", small_run[0], "--out", out)
    output = fedloom(*arguments, "--set", "federation.rouns=3", "--set", "data.partition.clients=0", code=2)
    assert "federation.rouns" in output
    assert "data.partition.clients" in output
    assert "Traceback" not in output
    assert "Executing task 'fetch'" not in output
    assert list(tmp_path.iterdir()) == []


def test_a_federation_that_fails_gives_its_own_exit_code(small_run: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("pipeline", "local", "personalized_federation", small_run[0], "--out", out)
    output = fedloom(*arguments, "--set", "algorithm.local.lr=1.0e+30", code=5)
    assert "error: federate: " in output
    assert "Traceback" not in output
    assert (out / "pipeline.log").is_file()
    assert (out / "run" / "journal.jsonl").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_folder(small_run: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    output = fedloom(
        "pipeline", "local", "unseen-clients", small_run[0], "--param", "model=x", "--out", tmp_path, code=2
    )
    assert tells(output, "--out", tmp_path)
    output = fedloom("pipeline", "local", "nothing", small_run[0], "--out", tmp_path / "out", code=2)
    assert "personalized_federation, compare_methods, unseen_clients" in output


def descendants(pid: int) -> set[int]:
    """Return all descendants of a process."""
    found = set(children(pid))
    return found.union(*(descendants(child) for child in found))


def test_a_stopped_pipeline_leaves_no_process(small_run: tuple[Path, Path], tmp_path: Path) -> None:
    """Also if only the command gets the signal, as from `kill`, while a federation with workers is running.

    Its processes are no forks: each task is behind a shell, as Kubeflow starts it.
    """
    path = experiment(tmp_path / "long", Path(yaml.safe_load(small_run[0].read_text())["data"]["root"]))
    out = tmp_path / "out"
    settings = ("--set", "federation.rounds=100000", "--set", "runtime.workers=2")
    process = subprocess.Popen(
        [*FEDLOOM, "pipeline", "local", "personalized_federation", str(path), "--out", str(out), *settings],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    known: set[int] = set()
    try:
        until(lambda: any("metrics.jsonl" in f for _, _, fs in os.walk(tmp_path) for f in fs), "a round is evaluated")
        known = descendants(process.pid)
        assert len(known) >= 4  # runner, task, federation, workers
        process.send_signal(signal.SIGTERM)
        ended(process, 130)
    finally:
        for pid in (process.pid, *known):
            if Path(f"/proc/{pid}").exists() and process.poll() is None:
                os.kill(pid, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in known), "all processes are gone", WAIT_S)
    assert (out / "run" / "checkpoints").is_dir()
