"""Spread of the clients' models: equal to that of the models themselves, 0 for equal models, absent where unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, IMAGE, clients, federation, problem_of
from torch import Tensor

import fedloom
from fedloom.algorithms.base import find_algorithm
from fedloom.data.own import own_manifest
from fedloom.data.spec import Normalization
from fedloom.engine.assemble import evaluation_plan
from fedloom.evaluation.group_statistics import spreads
from fedloom.evaluation.plan import EvaluationPlan, EvaluationResult
from fedloom.evaluation.spread import SKETCH, add_sketches, implausible_sketch
from fedloom.experiment import Experiment, OwnData
from fedloom.messages import VALUE_LIMIT
from fedloom.models.networks import MLP
from fedloom.models.predictors import Ensemble, ModelPredictor

PLAN = EvaluationPlan.of(EvaluationPlan.of_classes(CLASSES).targets, sketches=True)
LOCAL = {"steps": 5, "batch_size": 4, "lr": 0.05}


def evaluation(thetas: Tensor, model: MLP, *, seen: int | None = None) -> EvaluationResult:
    """Return an evaluation of clients with these models ``[n, d]``, the first of which are seen."""
    n = len(thetas)
    found = PLAN.nothing(n, 1)
    add_sketches(found.models, [{"personal": ModelPredictor(model, theta)} for theta in thetas])
    everyone = torch.ones(n, dtype=torch.bool)
    return EvaluationResult(
        round=1,
        clients=tuple(f"c{i}" for i in range(n)),
        seen=torch.arange(n) < (n if seen is None else seen),
        present=everyone,
        predictors=("personal",),
        **found.tensors(),
        plan=PLAN,
    )


def exact(thetas: Tensor) -> dict[str, Any]:
    mean = thetas.double().mean(0)
    distance = float((thetas.double() - mean).square().sum(1).mean().sqrt())
    return {"clients": len(thetas), "distance": distance, "relative": distance / float(mean.norm())}


def drawn(model: MLP, n: int, apart: float) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return model.init(generator) + apart * torch.randn(n, model.layout.size, generator=generator)


def test_models_that_fit_into_a_sketch_have_their_exact_spread() -> None:
    model = MLP((1, 3, 3), [11], CLASSES)
    assert model.layout.size < SKETCH
    thetas = drawn(model, 7, 0.3)
    found = spreads(evaluation(thetas, model, seen=4))
    assert found["seen"] == pytest.approx(exact(thetas[:4]))
    assert found["unseen"] == pytest.approx(exact(thetas[4:]))


@pytest.mark.parametrize("width", [40, 300])
def test_larger_models_have_nearly_their_spread(width: int) -> None:
    """Two models, whose distance has the largest error: four deviations of it are 4 · √(2/512) / 2 = 13 %."""
    model = MLP(IMAGE, [width], CLASSES)
    assert model.layout.size > SKETCH
    thetas = drawn(model, 2, 0.01)
    found, expected = spreads(evaluation(thetas, model))["seen"], exact(thetas)
    assert found["distance"] == pytest.approx(expected["distance"], rel=0.13)
    assert found["relative"] == pytest.approx(expected["relative"], rel=0.2)


def test_equal_models_have_no_spread() -> None:
    model = MLP(IMAGE, [40], CLASSES)
    found = spreads(evaluation(drawn(model, 1, 0.0).expand(7, -1), model))
    assert found == {"seen": {"clients": 7, "distance": 0.0, "relative": 0.0}, "unseen": None}


def test_clients_whose_model_is_not_one_finite_vector_are_left_out() -> None:
    model = MLP((1, 3, 3), [11], CLASSES)
    thetas = drawn(model, 4, 0.3)
    thetas[1, 5] = torch.nan
    e = evaluation(thetas, model)
    assert spreads(e)["seen"] == pytest.approx(exact(thetas[[0, 2, 3]]))
    e.present[0] = False
    assert spreads(e)["seen"] == pytest.approx(exact(thetas[[2, 3]]))
    e.present[2] = False
    assert spreads(e)["seen"] is None
    found = torch.zeros(2, 1 + SKETCH, dtype=torch.float64)
    add_sketches(found, [{"personal": Ensemble(model, thetas[2:], mu=thetas[2])}, {}])
    assert not found.any()


def test_models_of_different_sizes_have_no_spread() -> None:
    e = evaluation(drawn(MLP((1, 3, 3), [11], CLASSES), 2, 0.3), MLP((1, 3, 3), [11], CLASSES))
    e.models[0, 0] += 1
    assert spreads(e)["seen"] is None


def test_impossible_sketches_are_rejected() -> None:
    sketch = torch.zeros(1 + SKETCH, dtype=torch.float64)
    assert implausible_sketch(sketch) is None
    assert implausible_sketch(sketch[:0]) is None
    sketch[0], sketch[1] = 3, -3 * VALUE_LIMIT
    assert implausible_sketch(sketch) is None
    sketch[0] = 2
    assert implausible_sketch(sketch) is not None
    sketch[1] = 0
    for parameters in (-1, 1.7e308):
        sketch[0] = parameters
        assert implausible_sketch(sketch) is not None


def line(folder: Path, method: str, settings: dict[str, Any], **keys: Any) -> tuple[dict[str, Any], Any]:
    """Return the last line of ``metrics.jsonl`` of a federation of five clients, and the federation."""
    data = clients((4, 9, 6, 5, 8))
    algorithm = find_algorithm(method)
    s = algorithm.settings.model_validate({"local": LOCAL} | settings)
    p = problem_of(MLP(IMAGE, [5], CLASSES), data)
    f = federation(folder, algorithm, s, p, data, unseen=["c3", "c4"], plan=keys.pop("plan", PLAN), **keys)
    return {"spread": spreads(f.run())}, f


@pytest.mark.parametrize("at_once", [1, 3])
def test_runs_measure_the_spread_of_what_their_clients_predict_with(tmp_path: Path, at_once: int) -> None:
    found, f = line(tmp_path, "fedavg", {"personalize_steps": 3}, at_once=at_once)
    for name, ids in (("seen", ("c0", "c1", "c2")), ("unseen", ("c3", "c4"))):
        thetas = torch.stack([f.predictors[1, id]["personal"].tensors()["theta"] for id in ids])
        assert thetas.shape[1] > SKETCH
        assert found["spread"][name]["clients"] == len(ids)
        assert found["spread"][name]["distance"] == pytest.approx(exact(thetas)["distance"], rel=0.13)
        assert found["spread"][name]["distance"] > 0


def test_a_shared_model_has_no_spread(tmp_path: Path) -> None:
    found, _ = line(tmp_path, "fedavg", {})
    assert found["spread"]["seen"] == {"clients": 3, "distance": 0.0, "relative": 0.0}
    assert found["spread"]["unseen"]["distance"] == 0.0


def test_predictors_with_more_than_a_vector_have_none(tmp_path: Path) -> None:
    found, _ = line(tmp_path, "knn-per", {})
    assert found["spread"] == {"seen": None, "unseen": None}


@pytest.mark.parametrize("secure", [False, True])
def test_lines_and_summaries_have_the_spread_unless_metrics_are_summed(tmp_path: Path, *, secure: bool) -> None:
    rows = np.random.default_rng(0).normal(size=(8, 20, 4)).astype(np.float32)
    data = {f"site-{i}": (x, (x.sum(1) > 0).astype(np.int64)) for i, x in enumerate(rows)}
    run = fedloom.run(
        {
            "name": "spread",
            "data": fedloom.Federated.from_arrays(data, root=tmp_path / "data", held_out_fraction=0.5),
            "model": {"name": "mlp", "hidden": [3]},
            "algorithm": {"name": "fedavg", "weighting": "uniform", "local": LOCAL, "personalize_steps": 2},
            "federation": {"rounds": 1, "clients_per_round": 4, **({"secure_aggregation": {}} if secure else {})},
            "runtime": {"workers": 0},
        },
        out=tmp_path / "run",
        report=False,
        progress=False,
    )
    found = run.summary["spread"]
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["spread"] == found
    if secure:
        assert found == {"seen": None, "unseen": None}
        return
    for name in ("seen", "unseen"):
        assert found[name]["clients"] == 4
        assert found[name]["distance"] > 0


def test_members_of_a_federation_send_no_sketches() -> None:
    """Their models are theirs; the data of a simulation belong to the process that starts it."""
    own = {"data": {"own": {"kind": "features", "input_shape": [4], "classes": ["a", "b"]}}}
    simulated = {"data": {"dataset": "vowel", "partition": {"scheme": "natural"}}}
    rest = {"name": "spread", "model": {"name": "mlp"}, "algorithm": {"name": "fedavg"}, "federation": {"rounds": 1}}
    zeros = Normalization((0.0,) * 4, (1.0,) * 4)
    member, simulation = (Experiment.model_validate(rest | data) for data in (own, simulated))
    assert isinstance(member.data, OwnData)
    manifest = own_manifest(member.data.own, (), 0, zeros)
    assert evaluation_plan(member, manifest).sketches is False
    assert evaluation_plan(simulation, manifest).sketches is True
    assert evaluation_plan(member, manifest).shapes(2)["models"] == (0,)
