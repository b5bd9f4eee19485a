"""Clients without training data are measured with the shared model, in every method that has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_method import METHODS, PLAIN, SIZES, made
from federations import CLASSES, IMAGE, clients, group
from torch import Tensor

from fedloom.algorithms.base import Setup, find_algorithm
from fedloom.algorithms.batches import NothingToTrainOn
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError
from fedloom.evaluation.group_statistics import groups
from fedloom.evaluation.plan import EvaluationResult
from fedloom.models.predictors import predictor_of
from fedloom.tasks.base import TOTAL

STEPS: dict[str, dict[str, Any]] = {
    "afl": {"personalize_steps": 2},
    "comfedl": {"adapt_steps": 2},
    "comfedl damaml": {"adapt_steps": 2},
    "drfa": {"personalize_steps": 2},
    "fedprox": {"personalize_steps": 2},
    "pfnm": {"personalize_steps": 2},
}
"""Settings by which a client makes steps of its own, of methods that make none by default."""

UNTRAINED = {"fedrod"}
"""Methods whose personal model takes no training examples of a new client."""


def with_a_shared_model() -> list[str]:
    problem = Setup(PLAIN, CLASSES, IMAGE, 3, torch.float64, roster=("c0", "c1"))
    found = []
    for name, settings in METHODS.items():
        method = find_algorithm(name.split()[0])
        half = method.client(method.settings.model_validate(settings), problem)
        found += [name] if "global" in half.predictors else []
    return found


def lacking(c: ClientData, what: str) -> ClientData:
    """Return the client without training examples, or without their labels."""
    x, y = c.train.x, c.train.y
    return replace(c, train=Split(x[:0], y[:0]) if what == "examples" else Split(x, None))


def measured(
    folder: Path, name: str, data: list[ClientData]
) -> tuple[EvaluationResult, dict[str, Any], dict[str, Tensor]]:
    f = made(folder, name, data=data, unseen=["c2"], **STEPS.get(name, {}))
    evaluation = f.run()
    return evaluation, f.predictors[f.loop.round, "c2"], f.state


def test_the_methods_are_found() -> None:
    assert {"fedavg", "ditto", "apfl", "knn-per", "pfedme", "per-fedavg", "pfedbayes", "wga"} < set(
        with_a_shared_model()
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", ["examples", "labels"])
@pytest.mark.parametrize("name", with_a_shared_model())
def test_a_client_without_training_data_is_measured_under_global(tmp_path: Path, name: str, what: str) -> None:
    data = clients(SIZES)
    whole, _, state = measured(tmp_path / "whole", name, data)
    found, named, same = measured(tmp_path / "lacking", name, [*data[:2], lacking(data[2], what)])
    assert all(torch.equal(tensor, same[key]) for key, tensor in state.items())
    assert found.present.all()
    assert torch.equal(found.of("global", "test", "unmasked"), whole.of("global", "test", "unmasked"))
    assert torch.equal(found.of("personal", "test", "unmasked")[:2], whole.of("personal", "test", "unmasked")[:2])
    assert ("personal" in named) is (name in UNTRAINED)
    total = float(found.of("personal", "test", "unmasked")[2, TOTAL])
    assert total == (2 if name in UNTRAINED else 0)
    statistics = groups(found, label_mask=False)
    assert (statistics["unseen"] is not None) is (name in UNTRAINED)
    assert statistics["global"] is not None
    assert statistics["global"]["clients"] == 3
    assert statistics["global"]["unseen"]["clients"] == 1


def test_a_batch_names_the_client_without_training_data() -> None:
    data, method = clients(SIZES), find_algorithm("fedavg")
    half = method.client(method.settings.model_validate(METHODS["fedavg"]), Setup(PLAIN, CLASSES, IMAGE, 3))
    theta = PLAIN.init(torch.Generator().manual_seed(1), torch.float64)
    with pytest.raises(NothingToTrainOn, match="c2"):
        next(half.open(group([data[0], lacking(data[2], "examples")]), method.messages[2](theta)))


def test_its_personal_model_is_rejected() -> None:
    with pytest.raises(DataError, match=r"c2.* personal .*global"):
        predictor_of("c2", {"global": object()}, "personal")  # type: ignore[dict-item]
