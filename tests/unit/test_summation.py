"""Sums of answers through the round loop: in plain, and under secure aggregation, against plain averaging."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import IMAGE, clients, federation, problem_of
from torch import Tensor

from fedloom.algorithms.base import Algorithm, find_algorithm
from fedloom.algorithms.sums import sums_of
from fedloom.errors import ExperimentError
from fedloom.evaluation.group_statistics import groups
from fedloom.evaluation.summary import left_out
from fedloom.messages import SummedMetrics
from fedloom.models.networks import MLP
from fedloom.privacy.settings import SecureAggregation
from fedloom.security.signing import NO_SIGNING
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.summation import Summation

METHODS = (
    "fedavg", "scaffold", "fedrep", "pfedbayes", "comfedl", "fedadam", "q-fedavg", "feddyn", "ditto", "fedproto",
    "drfa", "fgdro-kl",
)  # fmt: skip
SIZES = (12, 7, 9, 16, 11)


def summing(method: Algorithm, settings: Any, secure: SecureAggregation | None) -> dict[str, Any]:
    """Return what both sides of a federation need for sums."""
    summation = Summation(method.sums(settings), secure, sizes={f"c{i}": n for i, n in enumerate(SIZES)})
    return {"summation": summation, "held": HeldAnswers(summation, NO_SIGNING)}


def trained(
    folder: Path, name: str, secure: SecureAggregation | None, *, sums: bool = True, **keys: Any
) -> Mapping[str, Tensor]:
    """Return the server's state after two rounds."""
    method = find_algorithm(name)
    settings = method.settings(**({"replace": False, "gamma": 0.0} if name == "drfa" else {}))
    data = clients(SIZES)
    problem = problem_of(MLP(IMAGE, (8,), 3), data, roster=tuple(c.id for c in data))
    made = summing(method, settings, secure) if sums else {}
    run = federation(folder, method, settings, problem, data, rounds=2, **made, **keys)
    run.loop.run()
    return run.loop.server.state


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_plain_and_masked_sums_equal_the_mean(name: str, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", name, None, sums=False)
    clear = trained(tmp_path / "clear", name, None)
    masked = trained(tmp_path / "masked", name, SecureAggregation(bits=64, range=1000))
    for key, value in plain.items():
        torch.testing.assert_close(clear[key], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(masked[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "pfedbayes"])
def test_summed_metrics_have_the_statistics_of_each_clients_metrics(name: str, tmp_path: Path) -> None:
    """Except those of the worst clients, which no sum provides."""
    method, data = find_algorithm(name), clients((12, 7, 9, 16, 11, 8))
    problem = problem_of(MLP(IMAGE, (8,), 3), data)
    unseen = [c.id for c in data[:3]]
    plain = federation(tmp_path / "plain", method, method.settings(), problem, data, unseen=unseen).run()
    fields = {**method.sums(method.settings()), **sums_of(SummedMetrics)}
    summation = Summation(fields, SecureAggregation(bits=64, examples=16), dtype=torch.float64)
    held = HeldAnswers(summation, NO_SIGNING)
    made = federation(
        tmp_path / "summed", method, method.settings(), problem, data, unseen=unseen, summation=summation, held=held
    )
    summed = made.run()
    expected, found = groups(plain, label_mask=False), groups(summed, label_mask=False)
    assert summed.measured == 6
    assert left_out(summed, label_mask=False) == left_out(plain, label_mask=False)
    compare(expected, found)


def test_more_members_than_32_bits_hold_are_rejected() -> None:
    """Statistics of 32-bit sums use parts of 16 bits, whose sums over 2^16 members just fit."""
    method = find_algorithm("fedavg")
    summation = Summation(method.sums(method.settings()))
    (answer,) = summation.fields
    shapes = {field.name: (1,) for field in answer.fields()}
    for bits, members in ((32, 1 << 16), (64, (1 << 16) + 1)):
        assert summation.vector(answer, shapes, SecureAggregation(bits=bits), None, members).bits == bits  # type: ignore[arg-type]
    with pytest.raises(ExperimentError) as refused:
        summation.vector(answer, shapes, SecureAggregation(bits=32), None, (1 << 16) + 1)
    assert refused.value.key == "federation.secure_aggregation.bits"


def compare(expected: Any, found: Any, key: str = "") -> None:
    """Check numbers in nested mappings, and that values known only of single clients are None."""
    if isinstance(expected, dict):
        assert found is not None, key
        for name, value in expected.items():
            compare(value, found[name], name)
    elif "worst" in key:
        assert found is None
    else:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4), key
