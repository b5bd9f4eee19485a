"""kNN-Per against FedAvg, hand-counted votes, and datastores without the example (Marfoq et al., ICML 2022)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLASSES, IMAGE, Federation, client, clients, federation, group, manifest, setup
from torch import Tensor

from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.knnper import KNNPER, KNNPerSettings, Neighbours, nearest_of
from fedloom.data.federated import ClientData, Split
from fedloom.engine.run_data import check_clients
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import load_experiment
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP
from fedloom.tasks.regression import Regression

SIZES = (4, 9, 6)
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05}
MODEL = MLP(IMAGE, [5], CLASSES)
THETA = MODEL.init(torch.Generator().manual_seed(3), torch.float64)


def made(**changes: Any) -> KNNPerSettings:
    base: dict[str, Any] = {"local": LOCAL, "neighbours": [1, 3], "mixing": [0.0, 0.4, 1.0], "scale": 0.5}
    return KNNPerSettings.model_validate(base | changes)


def run(folder: Path, s: KNNPerSettings, data: list[ClientData] | None = None) -> Federation:
    f = federation(folder, KNNPER, s, setup(), data or clients(SIZES), rounds=2, unseen=["c2"])
    f.run()
    return f


def stored(c: ClientData, scale: float = 0.5, k: int = 1, mixing: float = 1.0) -> Neighbours:
    predictor = Neighbours(MODEL, THETA, c.train.x, c.train.y, scale)
    predictor.k, predictor.mixing = k, mixing
    return predictor


def by_hand(c: ClientData, queries: Tensor, k: int, mixing: float, scale: float) -> Tensor:
    """Return the probabilities of each query in turn, by the definition."""
    parameters = MODEL.layout.split(THETA)
    store = MODEL.features(parameters, c.train.x).tolist()
    rows = []
    for feature, logits in zip(MODEL.features(parameters, queries).tolist(), MODEL.logits(THETA, queries), strict=True):
        distances = [(sum((a - b) ** 2 for a, b in zip(feature, s, strict=True)), i) for i, s in enumerate(store)]
        votes = [0.0] * CLASSES
        for squared, i in sorted(distances)[:k]:
            votes[int(c.train.y[i])] += math.exp(-squared / (len(feature) * scale))
        vote = torch.tensor([v / sum(votes) for v in votes], dtype=torch.float64)
        rows.append(mixing * vote + (1 - mixing) * logits.softmax(0))
    return torch.stack(rows)


def test_the_shared_model_is_fedavgs_and_equals_the_personal_one_at_lambda_0(tmp_path: Path) -> None:
    knn = run(tmp_path / "knn", made(mixing=[0.0]))
    avg = federation(
        tmp_path / "avg", FEDAVG, FedAvgSettings.model_validate({"local": LOCAL}), setup(), clients(SIZES), rounds=2,
        unseen=["c2"],
    )  # fmt: skip
    avg.run()
    assert torch.equal(knn.state["theta"], avg.state["theta"])
    for c in clients(SIZES):
        expected = avg.predictors[2, c.id]["global"].log_probabilities(c.test.x)
        for predictor in knn.predictors[2, c.id].values():
            assert torch.equal(predictor.log_probabilities(c.test.x), expected)
    assert KNNPER.client(made(), setup()).personalization_steps("personal", 9) == 0


@pytest.mark.parametrize("k", [1, 2, 5, 9, 30])
@pytest.mark.parametrize("mixing", [0.0, 0.3, 1.0])
def test_predictions_follow_the_definition(k: int, mixing: float) -> None:
    c, queries = client("c0", 9), client("other", 7, seed=5).train.x
    found = stored(c, 0.5, k, mixing).probabilities(queries)
    torch.testing.assert_close(found, by_hand(c, queries, min(k, 9), mixing, 0.5), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.sum(1), torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 4, 9])
def test_regression_averages_neighbours_and_is_tuned_by_leave_one_out(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By loops, and by predictors of all examples but one."""
    monkeypatch.setattr(FlatModel, "task", Regression())
    c, queries, scale = client("c0", 9), client("other", 7, seed=5).train.x, 0.5
    x, y, parameters = c.train.x, c.train.y.double(), MODEL.layout.split(THETA)

    def by_hand(query: Tensor, rows: list[int], k: int, mixing: float) -> Tensor:
        z = MODEL.features(parameters, torch.cat([query[None], x[rows]]))
        squared = (z[1:] - z[0]).square().sum(1)
        nearest = squared.argsort(stable=True)[:k]
        weights = torch.exp(-squared[nearest] / (z.shape[1] * scale))
        mean = (weights[:, None] * y[rows][nearest]).sum(0) / weights.sum()
        return mixing * mean + (1 - mixing) * MODEL.logits(THETA, query[None])[0]

    predictor = stored(c, scale, k, 0.3)
    expected = torch.stack([by_hand(query, list(range(9)), k, 0.3) for query in queries])
    torch.testing.assert_close(predictor.predictions(queries), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(predictor.predict(predictor.named(), queries), expected, rtol=0, atol=1e-10)
    predictor.choose(x, [1, k], [0.0, 0.5, 1.0])
    losses = {
        (number, mixing): sum(
            float((by_hand(x[i], [j for j in range(9) if j != i], min(number, 8), mixing) - y[i]).square().mean())
            for i in range(9)
        )
        for number in {1, k}
        for mixing in (0.0, 0.5, 1.0)
    }
    assert losses[predictor.k, predictor.mixing] == pytest.approx(min(losses.values()), rel=1e-6)


def test_a_query_in_the_datastore_gets_its_own_label() -> None:
    """Also from float32 features, and in a large store, where distances by matrix products would not be 0."""
    c = client("c0", 60)
    x = c.train.x.float() + 100
    predictor = Neighbours(MODEL, THETA.float(), x, c.train.y, 0.5)
    predictor.mixing = 1.0
    assert torch.equal(predictor.probabilities(x), torch.nn.functional.one_hot(c.train.y, CLASSES).float())
    assert not nearest_of(predictor.features, predictor.features, 1)[0].any()


def test_k_and_lambda_are_chosen_by_leave_one_out() -> None:
    """Each example in turn is predicted by a datastore without it."""
    chosen = set()
    for seed in range(8):
        c, ks, mixings = client("c0", 8, seed=seed), [1, 2, 4, 20], [0.0, 0.25, 0.5, 1.0]
        best = (-1, -math.inf, 0, 0.0)
        for k in ks:
            for mixing in mixings:
                right, likelihood = 0, 0.0
                for i in range(8):
                    others = [j for j in range(8) if j != i]
                    rest = ClientData(c.id, Split(c.train.x[others], c.train.y[others]), c.train, c.train, CLASSES)
                    (p,) = by_hand(rest, c.train.x[i : i + 1], min(k, 7), mixing, 0.5)
                    right += int(p.argmax() == c.train.y[i])
                    likelihood += float(p[c.train.y[i]].log())
                better = right > best[0] or (right == best[0] and likelihood > best[1] + 1e-9)
                best = (right, likelihood, k, mixing) if better else best
        personal = KNNPER.personalize(MODEL, group([c]), THETA[None], made(neighbours=ks[::-1], mixing=mixings[::-1]))[
            0
        ]["personal"]
        found = personal.tensors()
        assert (found["k"].item(), found["mixing"].item()) == best[2:]
        chosen.add(best[2:])
    assert len(chosen) > 2


def test_one_example_gives_no_datastore() -> None:
    c = client("c0", 1)
    predictors = KNNPER.personalize(MODEL, group([c]), THETA[None], made())[0]
    expected = predictors["global"].log_probabilities(c.test.x)
    assert torch.equal(predictors["personal"].log_probabilities(c.test.x), expected)


def test_the_saved_state_reproduces_predictions() -> None:
    c = client("c0", 9)
    tensors = KNNPER.personalize(MODEL, group([c]), THETA[None], made(mixing=[0.4]))[0]["personal"].tensors()
    again = stored(c, tensors["scale"].item(), int(tensors["k"]), tensors["mixing"].item())
    assert torch.equal(again.features, tensors["features"])
    assert tensors.keys() == {"theta", "features", "labels", "k", "mixing", "scale"}
    personal = KNNPER.personalize(MODEL, group([c]), THETA[None], made(mixing=[0.4]))[0]["personal"]
    assert torch.equal(again.log_probabilities(c.test.x), personal.log_probabilities(c.test.x))


def test_a_client_without_labels_has_no_datastore() -> None:
    c = client("c0", 9)
    bare = ClientData(c.id, Split(c.train.x, None), c.validation, c.test, CLASSES)
    with pytest.raises(DataError, match=r"c0: .*labels"):
        KNNPER.personalize(MODEL, group([bare]), THETA[None], made())


def test_a_client_with_fewer_examples_than_any_k_is_rejected_before_training(tmp_path: Path) -> None:
    """By its counts in the manifest; a client that does not train may join at any time, and all its examples vote."""
    (tmp_path / "few.yaml").write_text(
        "{name: few, data: {dataset: vowel, partition: {scheme: natural}}, model: {name: mlp, hidden: [4]}, algorithm: "
        "{name: knn-per, neighbours: [10, 5]}, federation: {rounds: 1, clients_per_round: 2}}"
    )
    experiment, data = load_experiment(tmp_path / "few.yaml"), clients((5, 4))
    with pytest.raises(ExperimentError, match=r"knn-per .*\bc1\b.*\b4\b.*\b5\b.*algorithm\.neighbours"):
        check_clients(experiment, manifest(data).clients)
    check_clients(experiment, manifest(data, unseen=["c1"]).clients)
    s = made(neighbours=[7], mixing=[1.0])
    personal = KNNPER.personalize(MODEL, group(data[1:]), THETA[None], s)[0]["personal"]
    torch.testing.assert_close(personal.probabilities(data[1].test.x), by_hand(data[1], data[1].test.x, 4, 1.0, 0.5))
