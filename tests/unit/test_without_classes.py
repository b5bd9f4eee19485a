"""Data without classes, from the draw to the summary: Gaussian examples, the quadratic model, losses for accuracies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from facts import tells
from federations import Silent

from fedloom import experiment as experiments
from fedloom.data import datasets
from fedloom.data.assignment import PartitionSettings, client_means
from fedloom.data.federated import ClientData, FederatedDataset, Split
from fedloom.data.partition import partition_dataset
from fedloom.data.schemes import IidScheme, MeansScheme
from fedloom.engine import assemble, loops, results, run_data
from fedloom.errors import DataError, ExperimentError
from fedloom.evaluation.measure import measure
from fedloom.evaluation.summary import best
from fedloom.federation.evaluator import LoopHooks
from fedloom.models.networks import Quadratic
from fedloom.models.predictors import ModelPredictor
from fedloom.models.registry import LogisticSettings, QuadraticSettings
from fedloom.reporting.report import write_report
from fedloom.reporting.run_results import read_results
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import MODEL_LOSS


def dealt(root: Path, seed: int = 1, **keys: Any) -> FederatedDataset:
    scheme = MeansScheme.model_validate({"clients": 6, "dimension": 3, **keys})
    folder = partition_dataset("gaussian", PartitionSettings(scheme, seed, 0.3, 0.2), root=root)
    return FederatedDataset.open(folder)


def test_examples_are_distributed_around_their_clients_mean(tmp_path: Path) -> None:
    data = dealt(tmp_path, bias=4.0, distance=2.0, noise=0.5, train_per_client=4000)
    first = data.manifest.roster[0]
    means = {entry.id: data.client(entry.id).train.x.mean(0) for entry in data.manifest.clients}
    assert float(means[first].norm()) == pytest.approx(2, abs=0.05)
    helpers = [mean for client, mean in means.items() if client != first]
    assert [float((mean - means[first]).norm()) for mean in helpers] == pytest.approx([4.0] * 5, abs=0.1)
    assert torch.stack(helpers).std(0).max() < 0.03
    client = data.client(first)
    assert client.train.x.std(0).tolist() == pytest.approx([0.5] * 3, rel=0.05)
    assert (len(client.train), len(client.validation), len(client.test)) == (3200, 800, 200)
    assert client.train.y is None
    assert client.classes == data.manifest.spec.classes == 0
    assert data.manifest.spec.normalization.mean == (0.0,) * 3


def test_spread_moves_each_helper_independently() -> None:
    seen = np.array([False, True, True, True])
    scheme = MeansScheme(clients=4, dimension=5, bias=0.0, spread=2.0)
    means = client_means(scheme, seen, 1)
    gaps = np.linalg.norm(means - means[1], axis=1)
    assert gaps.tolist() == pytest.approx([2, 0, 2, 2])
    assert not np.allclose(means[2], means[3])


def test_the_draw_depends_only_on_the_seed(tmp_path: Path) -> None:
    one, same, other = dealt(tmp_path / "a"), dealt(tmp_path / "b"), dealt(tmp_path / "a", seed=2)
    assert one.manifest.fingerprint == same.manifest.fingerprint
    assert {entry.sha256 for entry in one.manifest.clients}.isdisjoint(entry.sha256 for entry in other.manifest.clients)
    assert len({entry.sha256 for entry in one.manifest.clients}) == 6


def test_the_quadratic_matches_its_formula() -> None:
    model, random = Quadratic(2, (3.0, 0.5)), torch.Generator().manual_seed(0)
    theta, x = torch.randn(2, generator=random), torch.randn(5, 2, generator=random)
    h = torch.diag(torch.tensor([3.0, 0.5]))
    expected = torch.stack([(theta - one) @ h @ (theta - one) / 2 for one in x])
    torch.testing.assert_close(model.loss(model.layout.split(theta), x, None), expected)
    assert model.init(random).tolist() == [0, 0]
    with pytest.raises(ExperimentError, match=r"curvature.*2.*3"):
        QuadraticSettings(curvature=(1.0, 2.0)).build((3,), 0, "features")


def test_its_loss_is_measured_but_no_accuracy() -> None:
    splits = [Split(torch.tensor([[1.0], [3.0]]), None)] * 3
    client = ClientData("c", *splits, 0)
    found = measure({"personal": ModelPredictor(Quadratic(1), torch.zeros(1))}, client, ["personal"], batch_size=1)
    assert found.counts[0, :, 0].tolist() == [[0.0, 2.0, 5.0]] * 2
    assert not found.counts[0, :, 1].any()
    assert found.confusion.shape == (1, 0, 0)
    broken = measure(
        {"personal": ModelPredictor(Quadratic(1), torch.tensor([torch.nan]))}, client, ["personal"], batch_size=2
    )
    assert torch.isfinite(broken.counts).all()


def test_the_best_round_has_the_lowest_validation_loss() -> None:
    groups = {"seen": None, "unseen": None, "global": None, "validation_pooled": None}
    lines = [{"round": t, "validation_loss": loss, **groups} for t, loss in ((0, 3.0), (1, 2.0), (2, 2.0), (3, 5.0))]
    chosen = best(lines)
    assert chosen["round"] == 1


def tree(root: Path, **keys: Any) -> dict[str, Any]:
    return {
        "name": "quadratic",
        "data": {"dataset": "gaussian", "root": str(root), "partition": {"scheme": "means", "clients": 5}},
        "model": {"name": "quadratic"},
        "algorithm": {"name": "wga", "batch_size": 4, "steps_per_round": 5},
        "federation": {"rounds": 4, "clients_per_round": 3},
        "evaluation": {"every": 1},
        "runtime": {"workers": 0},
    } | keys


def load(tmp_path: Path, **keys: Any) -> experiments.Experiment:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(tree(tmp_path, **keys)))
    return experiments.load_experiment(path)


def test_a_run_ends_with_losses(tmp_path: Path) -> None:
    e = load(tmp_path)
    dataset = run_data.make_partition(e)
    parts, folder = assemble.make_parts(e, dataset.manifest), RunFolder(tmp_path / "run")
    folder.make()
    folder.write("experiment.yaml", e.resolved_yaml())
    folder.write("partition.json", dataset.manifest.to_json())
    folder.write_json("environment.json", {"a": 1})

    loop = loops.loop(parts, assemble.in_process(parts, dataset, folder), folder, LoopHooks(Silent()))
    summary = results.conclude(parts, loop, loop.run(), 1.0)
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text)["seen"]["accuracy_mean"] is None
    lines = list(folder.lines("metrics.jsonl"))
    assert all(line["validation_pooled"] is None for line in lines)
    lowest = min(lines, key=lambda line: (line["validation_loss"], line["round"]))
    assert summary["best"]["round"] == lowest["round"]
    assert loop.best.round == lowest["round"]
    user = summary["wga"]["users"]
    assert (user["clients"], user["accuracy_mean"]) == (1, None)
    rows = (folder.read("clients.csv") or "").splitlines()
    row = next(r for r in rows if r.startswith(dataset.manifest.roster[0]))
    assert f"{user['loss_mean']:.6f}" in row
    page = write_report(folder.path).read_text()
    assert "<h2>Learning curves" in page
    assert "is not what FedLoom writes" not in page
    read = read_results(folder)
    assert read.headline == MODEL_LOSS
    loss = user["loss_mean"]  # of the only user
    assert read.results["personal"].groups["users"] == (1, loss, 0.0, loss, pytest.approx(loss), None)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"algorithm": {"name": "pefll"}}, ["algorithm.embedding.labels: ", "false"]),
        ({"algorithm": {"name": "pfedbayes"}}, ["algorithm.name: ", "pfedbayes", "labels"]),
        ({"algorithm": {"name": "knn-per"}}, ["algorithm.name: ", "knn-per", "labels"]),
        ({"data": {"dataset": "gaussian", "partition": {"scheme": "iid", "clients": 4}}}, ["iid", "means"]),
        (
            {"data": {"dataset": "mnist", "partition": {"scheme": "means", "clients": 5}}},
            ["data.partition.scheme: ", "means", "gaussian"],
        ),
    ],
)
def test_unsuitable_settings_are_rejected(tmp_path: Path, keys: dict[str, Any], found: list[str]) -> None:
    with pytest.raises(ExperimentError) as refused:
        load(tmp_path, **keys)
    assert tells(str(refused.value), *found)


def test_models_are_for_data_with_or_without_classes() -> None:
    with pytest.raises(ExperimentError, match="quadratic") as refused:
        LogisticSettings().build((2,), 0, "features")
    assert (refused.value.key, refused.value.found) == ("model.name", "logistic")
    with pytest.raises(ExperimentError, match=r"\b10\b.*logistic, mlp") as refused:
        QuadraticSettings().build((2,), 10, "features")
    assert (refused.value.key, refused.value.found) == ("model.name", "quadratic")
    with pytest.raises(ExperimentError, match=r"iid.*classes"):
        IidScheme(clients=3).check(0)


def test_there_is_nothing_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gaussian"):
        datasets.fetch_dataset(datasets.find_dataset("gaussian"), tmp_path)
