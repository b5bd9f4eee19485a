"""Inventory of the data that leave a client, in plain and under secure aggregation."""

from __future__ import annotations

import pytest

from fedloom.algorithms.base import available, find_algorithm
from fedloom.engine.disclosure import answers, measures
from fedloom.evaluation.group_statistics import summed_metrics
from fedloom.evaluation.plan import EvaluationPlan


@pytest.mark.parametrize("name", available())
def test_only_the_sums_of_a_method_are_marked_as_summed(name: str) -> None:
    method = find_algorithm(name)
    sums = method.sums(method.settings())
    reported = answers(method, sums=sums)
    summed = {(one.message, one.field) for one in reported if one.only_summed}
    assert summed == {(cls.__name__, field) for cls, fields in sums.items() for field in fields}
    plain = {(one.message, one.field) for one in answers(method)}
    assert {(one.message, one.field) for one in reported} <= plain
    assert not any(one.only_summed for one in answers(method))


def test_losses_at_the_shared_model_are_marked_as_visible() -> None:
    method = find_algorithm("comfedl")
    reported = {f"{one.message}.{one.field}": one for one in answers(method, sums=method.sums(method.settings()))}
    assert not reported["LossAtSharedModel.loss"].only_summed
    assert reported["CompositionalUpdate.delta_theta"].only_summed
    assert "CompositionalUpdate.first" not in reported  # not sent


def test_measurements_have_the_shapes_of_the_summed_ones() -> None:
    plan = EvaluationPlan.of_classes(3)
    sent = summed_metrics(plan.nothing(1, 2), plan)
    reported = measures(2, plan, only_summed=True)
    assert {one.field: one.shape for one in reported} == {
        name: tuple(tensor.shape[1:]) for name, tensor in sent.tensors().items()
    }
    assert all(one.only_summed for one in reported)
    assert {one.field for one in reported} - {one.field for one in measures(2, plan)} == {"moments"}
