"""A bound on the norm of each client's update, and trimmed means: their values, and a malicious member's influence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import tells
from federations import clients, federation, setup, variant
from pydantic import ValidationError
from scipy.stats import trim_mean
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import available, conversation, find_algorithm
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging, SharedModel, Update, bounded, trimmed_mean

SIZES = (4, 9, 6, 5, 7)
LOCAL = {"steps": 3, "batch_size": 3, "lr": 0.05}
ROBUST = tuple(
    name
    for name in available()
    if issubclass(find_algorithm(name).settings, Averaging) and name not in ("scaffold", "tr-maml")
)


def made(method: str, **keys: Any) -> Any:
    settings = find_algorithm(method).settings
    short = {"local": LOCAL} if "local" in settings.model_fields else {}
    return settings.model_validate({"weighting": "uniform", **short, **keys})


def trained(folder: Path, method: str, rounds: int = 2, **keys: Any) -> dict[str, Tensor]:
    run = federation(
        folder, find_algorithm(method), made(method, **keys), setup(n=len(SIZES)), clients(SIZES), rounds=rounds
    )
    run.run()
    return run.state


# ---- the means


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.25, 0.3, 0.49, 0.5])
def test_a_trimmed_mean_matches_other_implementations(rows: int, share: float) -> None:
    x = torch.randn(rows, 37, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    found = trimmed_mean(x, share).numpy()
    by_hand = []
    for column in x.T.tolist():
        middle, cut = sorted(column), int(share * rows + 1e-9)
        cut = min(cut, (rows - 1) // 2)
        by_hand.append(np.mean(middle[cut : len(middle) - cut]))
    np.testing.assert_allclose(found, by_hand, rtol=0, atol=1e-15)
    if share == 0.5:
        np.testing.assert_allclose(found, np.median(x.numpy(), axis=0), rtol=0, atol=1e-15)
    else:
        np.testing.assert_allclose(found, trim_mean(x.numpy(), share, axis=0), rtol=0, atol=1e-15)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    assert torch.equal(trimmed_mean(x[order], share), trimmed_mean(x, share))


def test_a_trimmed_mean_of_many_coordinates_is_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 1000, generator=torch.Generator().manual_seed(3))
    whole = trimmed_mean(x, 0.2)
    monkeypatch.setattr("fedloom.algorithms.fedavg.COLUMNS", 64)
    assert torch.equal(trimmed_mean(x, 0.2), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_bound_scales_larger_updates_and_keeps_the_rest_to_the_bit(dtype: torch.dtype) -> None:
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(5), dtype=dtype)
    x = x / x.norm(dim=1, keepdim=True) * torch.tensor([[0.5], [0.99], [7.0], [1e12]], dtype=dtype)
    found = bounded(x, 1.0)
    assert torch.equal(found[:2], x[:2])
    np.testing.assert_allclose(found[2:].norm(dim=1).numpy(), np.ones(2), rtol=1e-6)
    np.testing.assert_allclose(found[2].numpy(), (x[2] / x[2].norm()).numpy(), rtol=1e-5)


# ---- in methods


@pytest.mark.parametrize("method", ["fedavg", "fedavgm", "fedadam", "fedper", "lg-fedavg"])
def test_a_norm_bound_above_all_updates_changes_no_bit(tmp_path: Path, method: str) -> None:
    plain = trained(tmp_path / "plain", method)
    bound = trained(tmp_path / "bound", method, max_norm=1e30, trim=0.0)
    assert plain.keys() == bound.keys()
    for name in plain:
        assert torch.equal(plain[name], bound[name])


@pytest.mark.parametrize(
    ("method", "keys"),
    [("fedavg", {"trim": 0.5}), ("fedprox", {"trim": 0.2}), ("fedavgm", {"max_norm": 1e-3}), ("fedper", {"trim": 0.2})],
)
def test_a_norm_bound_and_a_trimmed_mean_change_the_model(tmp_path: Path, method: str, keys: dict[str, float]) -> None:
    plain, robust = trained(tmp_path / "plain", method), trained(tmp_path / "robust", method, **keys)
    assert not torch.equal(plain["theta"], robust["theta"])
    if "max_norm" in keys:
        start = federation(tmp_path / "start", find_algorithm(method), made(method), setup(n=5), clients(SIZES)).state[
            "theta"
        ]
        moved = 3 if method == "fedavgm" else 2  # its momentum of 0.9: twice the first step, once the second
        assert float((robust["theta"] - start).norm()) <= moved * 1e-3 * (1 + 1e-6)


def poisoned(method: str, by: float) -> base.Algorithm:
    """Return the method with a client c2 that does not train, and claims that every parameter changed by this much."""
    algorithm = find_algorithm(method)

    def client(settings: Any, problem: base.Setup) -> base.ClientAlgorithm:
        honest = algorithm.client(settings, problem)

        class Liar(type(honest)):  # type: ignore[misc]
            @conversation
            def train(self, clients: ClientGroup, opening: SharedModel) -> base.Conversation:
                (member,) = clients.clients
                if member.id != "c2":
                    return (yield from super().train(clients, opening))
                one = torch.ones(1, 1, dtype=torch.float64)
                yield Update(torch.full_like(opening.theta, by).expand(1, -1), one, one)
                return None

        return Liar(honest.method, settings, problem)

    return variant(algorithm, client=client)


@pytest.mark.parametrize(("by", "weighting", "lr"), [(1e6, "uniform", 1.0), (-1e12, "examples", 0.5)])
def test_a_poisoned_member_moves_the_model_by_at_most_the_bound(
    tmp_path: Path, by: float, weighting: str, lr: float
) -> None:
    s = made("fedavg", max_norm=0.25, weighting=weighting, server_lr=lr)
    run = federation(tmp_path, poisoned("fedavg", by), s, setup(n=5), clients(SIZES))
    start = run.state["theta"]
    run.run()
    assert 0 < float((run.state["theta"] - start).norm()) <= lr * 0.25 * (1 + 1e-9)
    (attempt,) = run.loop.journal.counted()
    assert attempt.statistics["bounded"] >= 1
    assert 0 < attempt.statistics["update_norm"] < 10  # the median, which is an honest one
    naked = federation(
        tmp_path / "naked", poisoned("fedavg", by), made("fedavg", weighting=weighting), setup(n=5), clients(SIZES)
    )
    naked.run()
    assert float((naked.state["theta"] - start).abs().max()) > 1e5


@pytest.mark.parametrize(("by", "trim"), [(1e6, 0.2), (-1e6, 0.5)])
def test_a_trimmed_mean_stays_within_the_honest_updates(tmp_path: Path, trim: float, by: float) -> None:
    """With one liar among five, and a fifth trimmed at each end, every coordinate lies between two honest ones'."""
    output: list[Tensor] = []
    run = federation(tmp_path, poisoned("fedavg", by), made("fedavg", trim=trim), setup(n=5), clients(SIZES))
    start = run.state["theta"]
    for i in (0, 1, 3, 4):  # the honest clients' models: after a round in which only one answered
        alone = federation(
            tmp_path / f"alone-{i}", find_algorithm("fedavg"), made("fedavg"), setup(n=1), [clients(SIZES)[i]]
        )
        alone.run()
        output.append(alone.state["theta"] - start)
    run.run()
    change, honest = run.state["theta"] - start, torch.stack(output)
    assert bool((change <= honest.max(0).values + 1e-15).all())
    assert bool((change >= honest.min(0).values - 1e-15).all())


@pytest.mark.parametrize("method", ROBUST)
def test_robust_aggregation_needs_each_update(method: str) -> None:
    needs = find_algorithm(method).needs_each_update
    assert not needs(made(method))
    assert needs(made(method, max_norm=1.0))
    assert needs(made(method, trim=0.1))


@pytest.mark.parametrize(
    ("method", "keys", "facts"),
    [
        ("fedavg", {"trim": 0.1, "weighting": "examples"}, ("trim", "uniform", "examples")),
        ("fedavg", {"trim": 0.6}, ("trim", "0.5")),
        ("fedavg", {"max_norm": 0.0}, ("max_norm", "0")),
        ("scaffold", {"max_norm": 1.0}, ("max_norm",)),
        ("scaffold", {"trim": 0.1}, ("trim",)),
        ("tr-maml", {"max_norm": 1.0}, ("max_norm",)),
        ("tr-maml", {"trim": 0.1}, ("trim",)),
        ("q-fedavg", {"trim": 0.1}, ("trim",)),
        ("afl", {"max_norm": 1.0}, ("max_norm",)),
    ],
)
def test_invalid_settings_are_rejected(method: str, keys: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as error:
        find_algorithm(method).settings.model_validate(keys)
    assert tells(str(error.value), *facts)
