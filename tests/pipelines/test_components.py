"""Each component alone: its body, called with Kubeflow's artifact objects, on real data."""

from __future__ import annotations

import gzip
import inspect
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import numpy as np
import pytest
import yaml
from facts import tells
from kfp import dsl
from run_processes import EXPERIMENT
from s3_support import S3Server

from fedloom.api import federated
from fedloom.data.manifest import read_manifest
from fedloom.kubeflow import catalog
from fedloom.runs.folder import RunFolder
from fedloom.storage import open_store

pytestmark = [pytest.mark.data, pytest.mark.group("components")]

COMPONENTS = Path(__file__).parents[2] / "components"
NAMES = sorted(path.parent.name for path in COMPONENTS.glob("*/component.py"))


def component(name: str) -> Any:
    """Return a component as compiled by Kubeflow."""
    return catalog.component(name)


def body(name: str) -> Any:
    """Return the function that the component's container calls."""
    return component(name).python_func


def artifact(kind: type, path: Path, **metadata: Any) -> Any:
    """Return an artifact stored on this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return kind(uri=str(path), metadata=metadata)


@dataclass(frozen=True)
class Chain:
    """Outputs of an experiment's components, in order."""

    plan: Any
    files: Any
    shards: Any
    model: Any
    metrics: Any


def chain(folder: Path, experiment: dict[str, Any], overrides: list[str] = []) -> Chain:  # noqa: B006
    planned = body("plan")(yaml.safe_dump(experiment), overrides)
    files = artifact(dsl.Dataset, folder / "files")
    body("fetch")(planned.dataset, files, planned.root)
    shards = artifact(dsl.Dataset, folder / "shards")
    body("partition")(planned.data, files, shards)
    model, metrics = artifact(dsl.Model, folder / "model"), artifact(dsl.Metrics, folder / "metrics")
    body("federate")(planned.experiment, shards, model, metrics, "run-1", task="first", backend="local")
    return Chain(planned, files, shards, model, metrics)


@pytest.fixture(scope="module")
def made(fresh_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    tree = json.loads(json.dumps(EXPERIMENT))
    tree["data"]["root"] = str(fresh_root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLOOM_REPORT", "1")
        patch.setattr(subprocess.Popen, "_execute_child", forked._execute_child)
        return chain(tmp_path_factory.mktemp("chain"), tree, ["federation.rounds=2"])


def test_every_component_is_thin_documented_and_installs_no_package() -> None:
    steps = "cleanup compare evaluate export federate fetch grid partition plan register report"
    assert steps.split() == NAMES
    for name in NAMES:
        one = component(name)
        lines = inspect.getsource(one.python_func).partition('"""')[2].partition('"""')[2].strip().splitlines()
        assert len([line for line in lines if line.strip()]) <= 15, name
        assert all(f"{key}: " in inspect.getdoc(one.python_func) for key in one.component_spec.inputs or {}), name
        command = " ".join(one.component_spec.implementation.container.command)
        assert "pip install" not in command
        readme = (COMPONENTS / name / "README.md").read_text()
        assert readme.startswith(f"# {name}\n")
        for key in (*(one.component_spec.inputs or {}), *(one.component_spec.outputs or {})):
            assert f"`{key}`" in readme or key == "Output", (name, key)


@pytest.mark.slow
def test_plan_fills_in_defaults_and_takes_overrides(made: Chain) -> None:
    e = json.loads(made.plan.experiment)
    assert e["federation"]["rounds"] == 2
    assert e["evaluation"]["batch_size"] == 512
    assert made.plan.dataset == "fashion-mnist"
    again = body("plan")(made.plan.experiment, ["federation.rounds=3"])
    assert again.data == made.plan.data  # the partition is unchanged, and a cache finds it
    assert again.experiment != made.plan.experiment


def test_plan_lists_every_error_and_exits_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        body("plan")("name: x\nsed: 1\ndata: {dataset: nothing}\n", [])
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith("error: the experiment")
    assert all(f"  {key}" in output or f", {key}: " in output for key in ("sed", "data.dataset", "model")), output


@pytest.mark.slow
def test_grid(made: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    local = "algorithm={name: local, local: {steps: 3}}; federation.rounds=0"
    points = body("grid")(made.plan.experiment, ["", local], [1, 2.0])  # a list's numbers arrive as doubles
    assert [point["label"] for point in points] == [
        "pefll-1-seed-1", "pefll-1-seed-2", "local-2-seed-1", "local-2-seed-2",
    ]  # fmt: skip
    assert points[0]["data"] == points[2]["data"] != points[1]["data"]
    assert json.loads(points[3]["experiment"])["federation"]["rounds"] == 0
    (only,) = body("grid")(made.plan.experiment, [], [])
    assert only["experiment"] == made.plan.experiment
    for methods, seeds, expected in (
        (["", " "], [1], "the same run as pefll-1-seed-1"),
        (["federation.rouns=1"], [1], "with federation.rouns=1; seed=1: "),
        ([""], ["three"], "'three'"),
        ([""], [1.5], "1.5"),
        ([""], [-1], "-1"),
        ([""], [2**53 + 2], str(2**53 + 2)),
        (["", "data={dataset: mnist, partition: {scheme: iid, clients: 20}}"], [], "got fashion-mnist, mnist"),
    ):
        with pytest.raises(SystemExit) as ended:
            body("grid")(made.plan.experiment, methods, seeds)
        assert ended.value.code == 2
        assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_fetching_from_a_folder_and_from_a_store(
    fashion_mnist_root: Path, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{s3_server.new_bucket()}/fashion"
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    given = tmp_path / "given"
    given.mkdir()
    for file in (fashion_mnist_root / "datasets" / "fashion-mnist").glob("*ubyte"):
        (given / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), 1))
        open_store(url).upload(f"{file.name}.gz", given / f"{file.name}.gz")
    assert len(list(given.iterdir())) == 4
    for number, source in enumerate((str(given), url)):
        root, files = tmp_path / f"root-{number}", artifact(dsl.Dataset, tmp_path / f"files-{number}")
        body("fetch")("fashion-mnist", files, str(root), source)
        stored = Path(files.path) / "datasets" / "fashion-mnist" / "t10k-labels-idx1-ubyte"
        assert stored.read_bytes() == gzip.decompress((given / "t10k-labels-idx1-ubyte.gz").read_bytes())
        assert files.metadata["classes"] == 10
    monkeypatch.setenv("KFP_POD_NAME", "a-pod")
    monkeypatch.setenv("HOME", "/nobody-may-write-here")
    body("fetch")("fashion-mnist", artifact(dsl.Dataset, tmp_path / "of-a-pod"), "", url)
    assert (tmp_path / "of-a-pod" / "datasets" / "fashion-mnist").is_dir()


def test_fetching_from_an_empty_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = artifact(dsl.Dataset, tmp_path / "files")
    for dataset, source, code in (("fashion-mnist", str(tmp_path / "none"), 3), ("nothing", "", 2)):
        with pytest.raises(SystemExit) as ended:
            body("fetch")(dataset, files, str(tmp_path / "root"), source)
        assert ended.value.code == code
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_a_partition_is_complete_and_repeatable(made: Chain, tmp_path: Path) -> None:
    again = artifact(dsl.Dataset, tmp_path / "shards")
    body("partition")(made.plan.data, made.files, again)
    assert again.metadata == made.shards.metadata
    for client in read_manifest(Path(again.path)).clients:
        shard = Path("shards") / f"{client.id}.safetensors"
        assert (Path(again.path) / shard).read_bytes() == (Path(made.shards.path) / shard).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]
    assert {path.name for path in Path(made.files.path).iterdir()} == {"about.json", "datasets"}  # it is only read


@pytest.mark.slow
def test_a_partition_that_cannot_be_created(made: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(made.plan.data)
    data["partition"] |= {"classes_per_client": 11, "shares": None}
    with pytest.raises(SystemExit) as ended:
        body("partition")(json.dumps(data), made.files, artifact(dsl.Dataset, tmp_path / "shards"))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "shards").exists()


def test_federate(made: Chain) -> None:
    assert made.model.metadata["label"] == "first"
    assert made.model.metadata["rounds"] == 2
    summary = json.loads((Path(made.model.path) / "summary.json").read_text())
    assert made.metrics.metadata["seen_loss_mean"] == summary["seen"]["loss_mean"]
    assert json.loads(Path(made.metrics.path).read_text()) == summary


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"backend": "slurm"}, "backend must be local or kubernetes (got slurm)"),
        ({"backend": "local", "cluster": '{"worker": 3}'}, "worker"),
        ({"backend": "local", "cluster": "workers: 3"}, "not JSON"),
        ({"backend": "kubernetes", "cluster": '{"image": "a:1"}'}, "storage is not set"),
    ],
)
def test_federate_rejects_impossible_settings(
    made: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str], expected: str
) -> None:
    model, metrics = artifact(dsl.Model, tmp_path / "model"), artifact(dsl.Metrics, tmp_path / "metrics")
    with pytest.raises(SystemExit) as ended:
        body("federate")(
            made.plan.experiment, made.shards, model, metrics, "run-1", task_config=dsl.TaskConfig(), **settings
        )
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def evaluated(folder: Path, model: Any, shards: Any, checkpoint: str = "last") -> Any:
    found = SimpleNamespace(
        evaluation=artifact(dsl.Artifact, folder / "evaluation"),
        metrics=artifact(dsl.Metrics, folder / "metrics"),
        confusion=artifact(dsl.ClassificationMetrics, folder / "confusion"),
    )
    body("evaluate")(model, shards, found.evaluation, found.metrics, found.confusion, checkpoint)
    return found


@pytest.mark.slow
def test_tasks_that_need_no_torch_do_not_import_it(made: Chain, tmp_path: Path) -> None:
    """Importing it takes seconds, in every task."""
    found = evaluated(tmp_path, made.model, made.shards)
    script = f"""
import sys
from pathlib import Path
from fedloom.kubeflow import steps
out = Path({str(tmp_path)!r})
steps.fetch_task("fashion-mnist", out / "files", {made.plan.root!r})
steps.partition_task({made.plan.data!r}, out / "files", out / "shards")
steps.report_task(Path({made.model.path!r}), Path({found.metrics.path!r}), out / "page", out / "table")
steps.cleanup_task("local", "run-1", "")
import fedloom.cluster.local
sys.exit("torch" in sys.modules or "kfp" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)


def test_evaluating_a_chosen_checkpoint(made: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(tmp_path / "1", made.model, made.shards, "1")
    measured, summary = (json.loads(Path(metrics.path).read_text()) for metrics in (found.metrics, made.metrics))
    assert measured["round"] == 1
    assert measured["seen"]["loss_mean"] != summary["seen"]["loss_mean"]
    assert found.metrics.metadata["seen_loss_mean"] == measured["seen"]["loss_mean"]
    with pytest.raises(SystemExit) as ended:
        evaluated(tmp_path / "x", made.model, made.shards, "newest")
    assert ended.value.code == 2
    assert tells(capsys.readouterr().err, "checkpoint", "last, best", "'newest'")


def test_evaluation_rejects_other_data(made: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = artifact(dsl.Dataset, tmp_path / "other")
    shutil.copytree(made.shards.path, other.path)
    path = Path(other.path) / "partition.json"
    path.write_text(replace(read_manifest(Path(other.path)), dataset="mnist").to_json())
    with pytest.raises(SystemExit) as ended:
        evaluated(tmp_path, made.model, other)
    assert ended.value.code == 3
    assert "mnist" in capsys.readouterr().err


@pytest.mark.slow
def test_report_and_compare(made: Chain, tmp_path: Path) -> None:
    found = evaluated(tmp_path, made.model, made.shards)
    page, table = artifact(dsl.HTML, tmp_path / "page"), artifact(dsl.Markdown, tmp_path / "table")
    body("report")(made.model, found.metrics, page, table)
    assert Path(page.path).read_bytes() == (Path(made.model.path) / "report.html").read_bytes()
    second = artifact(dsl.Model, tmp_path / "model", label="second")
    shutil.copytree(made.model.path, second.path)
    folder = RunFolder(Path(second.path))
    for name in ("experiment.yaml", "summary.json"):
        folder.write(name, folder.text(name).replace("seed: 5", "seed: 6").replace('"seed": 5', '"seed": 6'))
    files = artifact(dsl.Artifact, tmp_path / "files")
    body("compare")([made.model, second], page, table, files)
    assert "± 0.0" in Path(table.path).read_text()  # one line for both seeds
    assert {"compare.csv", "compare.tex", "figures"} <= {path.name for path in Path(files.path).iterdir()}
    second.metadata["label"] = "first"
    with pytest.raises(SystemExit):
        body("compare")([made.model, second], page, table, artifact(dsl.Artifact, tmp_path / "again"))


@pytest.mark.exhaustive  # a federation of its own
def test_data_without_classes(forks: None, tmp_path: Path) -> None:
    tree = yaml.safe_load((Path(__file__).parents[2] / "experiments" / "wga-quadratic.yaml").read_text())
    one = chain(tmp_path, tree, ["federation.rounds=2", "runtime.workers=0"])
    found = evaluated(tmp_path / "evaluated", one.model, one.shards)
    assert "confusionMatrix" not in found.confusion.metadata
    page, table = artifact(dsl.HTML, tmp_path / "page"), artifact(dsl.Markdown, tmp_path / "table")
    body("report")(found.evaluation, found.metrics, page, table)
    (seen,) = [line for line in Path(table.path).read_text().splitlines() if line.startswith("| seen | ")]
    loss = json.loads(Path(found.metrics.path).read_text())["seen"]["metrics"]["loss"]
    assert all(f"{loss[key]:.4g}" in seen for key in ("mean", "worst", "worst_decile", "pooled"))


def test_cleanup_removes_nothing_for_local_processes() -> None:
    body("cleanup")("run-1", "local", "")


@pytest.mark.slow
def test_regression_data_are_federated_evaluated_and_reported(forks: None, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    x = random.normal(5, 3, (160, 4)).astype(np.float32)
    y = x @ np.array([4.0, -2.0, 1.0, 3.0]) * 100 + 5000
    clients = {f"c{i}": (x[i::4], y[i::4]) for i in range(4)}
    data = federated.Federated.from_arrays(clients, root=tmp_path / "root", held_out_fraction=0.25)
    experiment = {
        "name": "prices",
        "data": data.section,
        "model": {"name": "mlp", "hidden": [8]},
        "algorithm": {"name": "fedavg", "local": {"steps": 5, "lr": 0.05}},
        "federation": {"rounds": 2, "clients_per_round": 2},
        "runtime": {"workers": 0},
    }
    shards = artifact(dsl.Dataset, tmp_path / "shards")
    shutil.copytree(data.open().folder, shards.path)
    model, metrics = artifact(dsl.Model, tmp_path / "model"), artifact(dsl.Metrics, tmp_path / "metrics")
    body("federate")(json.dumps(experiment), shards, model, metrics, "run-1", task="first", backend="local")
    assert {"seen_rmse_mean", "unseen_rmse_mean", "global_rmse_mean"} <= set(model.metadata)
    found = evaluated(tmp_path / "evaluated", model, shards)
    summary, again = (json.loads(Path(each.path).read_text()) for each in (metrics, found.metrics))
    for group in ("seen", "unseen", "global"):
        assert again[group]["metrics"] == summary[group]["metrics"]
    assert again["seen"]["metrics"]["rmse"]["mean"] > 10  # in the targets' units
    assert found.metrics.metadata["seen_rmse_mean"] == pytest.approx(summary["seen"]["metrics"]["rmse"]["mean"])
    assert "confusionMatrix" not in found.confusion.metadata
    page, table = artifact(dsl.HTML, tmp_path / "page"), artifact(dsl.Markdown, tmp_path / "table")
    body("report")(found.evaluation, found.metrics, page, table)
    assert tells(Path(table.path).read_text(), "RMSE", f"{summary['seen']['metrics']['rmse']['mean']:.4g}")
    assert "RMSE" in Path(page.path).read_text()
    body("compare")([model], page, table, artifact(dsl.Artifact, tmp_path / "files"))
    assert "RMSE" in Path(table.path).read_text()
