"""Validation of replies, with one-line reasons."""

import re

import pytest
import torch
from facts import tells
from torch import Tensor

from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.validation import fault
from fedloom.messages import Message, Metrics, Quantity, broadcast, rows


class Update(Message):
    delta: Tensor = rows(Quantity.MODEL_UPDATE)
    steps: Tensor = rows(Quantity.COUNT)


class Shared(Message):
    x: Tensor = broadcast(Quantity.MODEL)


SHAPES = {Update: {"delta": (3,), "steps": ()}, Shared: {"x": (2, 2)}, Metrics: EvaluationPlan.of_classes(3).shapes(1)}


def check(message, dtype=torch.float32):
    return fault(message, SHAPES, dtype)


def test_valid_replies_have_no_fault():
    assert check(Update(torch.zeros(1, 3), torch.zeros(1, dtype=torch.float64))) is None
    assert check(Update(torch.zeros(1, 3), torch.zeros(1))) is None
    assert check(Shared(torch.zeros(2, 2))) is None
    assert check(EvaluationPlan.of_classes(3).nothing(1, 1)) is None


@pytest.mark.parametrize(
    ("message", "output"),
    [
        (Update(torch.zeros(1, 4), torch.zeros(1)), r"Update.delta has shape \[1, 4\], expected \[1, 3\]"),
        (Update(torch.zeros(2, 3), torch.zeros(2)), r"Update.delta has shape \[2, 3\], expected \[1, 3\]"),
        (Update(torch.zeros(1, 3).double(), torch.zeros(1)), "Update.delta has dtype torch.float64, expected torch.fl"),
        (Update(torch.zeros(1, 3), torch.zeros(1).long()), "Update.steps has dtype torch.int64"),
        (Update(torch.tensor([[0.0, torch.nan, 0.0]]), torch.zeros(1)), r"delta \(model_update\) is not finite"),
        (Update(torch.zeros(1, 3), torch.tensor([torch.inf])), r"steps \(count\) is not finite"),
    ],
)
def test_faults_name_field_found_and_expected(message, output):
    assert re.search(output, check(message) or "")


def test_an_unexpected_message():
    assert tells(fault(Shared(torch.zeros(1)), {Update: SHAPES[Update]}, torch.float32) or "", "Shared", "Update")


def test_a_sum_that_overflows_is_valid():
    largest = torch.finfo(torch.float32).max
    assert check(Update(torch.full((1, 3), largest), torch.zeros(1))) is None
    assert "not finite" in check(Update(torch.tensor([[largest, largest, float("nan")]]), torch.zeros(1)))
    assert "not finite" in check(Update(torch.tensor([[float("inf"), float("-inf"), 0.0]]), torch.zeros(1)))
