"""Messages and replies: rows, broadcasts, and absent rows."""

from __future__ import annotations

import re

import pytest
import torch
from facts import tells
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.validation import fault
from fedloom.messages import Message, Metrics, Quantity, Replies, broadcast, rows, stack


class Answer(Message):
    delta: Tensor = rows(Quantity.MODEL_UPDATE)
    loss: Tensor = rows(Quantity.LOSS)


class Opening(Message):
    shared: Tensor = broadcast(Quantity.MODEL)
    own: Tensor = rows(Quantity.DESCRIPTOR)


class Shared(Message):
    shared: Tensor = broadcast(Quantity.MODEL)


class Nothing(Message):
    """Message without fields."""


def answer(i: int) -> Answer:
    return Answer(torch.full((1, 3), float(i)), torch.tensor([[10.0 * i]], dtype=torch.float64))


def replies(present: list[bool], sizes: list[int]) -> Replies[Answer]:
    message = stack(Answer, [answer(i + 1) if here else None for i, here in enumerate(present)])
    return Replies(message, torch.tensor(present), torch.tensor(sizes))


# --- messages ---------------------------------------------------------------------------------------------------------


@given(index=st.lists(st.integers(0, 5), max_size=8))
def test_select_takes_rows_and_keeps_broadcasts(index: list[int]) -> None:
    message = Opening(torch.arange(4.0), torch.arange(12.0).reshape(6, 2))
    picked = message.select(index)
    assert picked.shared is message.shared
    assert picked.own.tolist() == [message.own[i].tolist() for i in index]


def test_selecting_adjacent_rows_returns_a_view() -> None:
    message = Opening(torch.zeros(1), torch.arange(12.0).reshape(6, 2))
    assert message.select([2, 3, 4]).own.data_ptr() == message.own[2].data_ptr()
    assert message.select([4, 3]).own.tolist() == [[8, 9], [6, 7]]


def test_a_message_without_rows_is_the_same_for_every_client() -> None:
    for message in (Shared(torch.zeros(3)), Nothing()):
        assert message.select([1, 2]) is message


def test_client_bytes_are_a_row_and_the_broadcasts() -> None:
    assert Opening(torch.zeros(4), torch.zeros(6, 2, dtype=torch.float64)).client_bytes() == 4 * 4 + 2 * 8
    assert answer(1).client_bytes() == 3 * 4 + 8
    assert Opening(torch.zeros(4), torch.zeros(0, 2)).client_bytes() == 16
    assert Nothing().client_bytes() == 0


def test_a_field_must_declare_its_kind() -> None:
    class Odd(Message):
        x: Tensor

    with pytest.raises(TypeError, match=r"Odd\.x .*rows\(\).*broadcast\(\)"):
        Odd(torch.zeros(1)).fields()


# --- stacking ---------------------------------------------------------------------------------------------------------


def test_the_row_of_an_absent_client_is_zero() -> None:
    stacked = stack(Answer, [None, answer(2), None, answer(4)])
    assert stacked.delta.tolist() == [[0] * 3, [2] * 3, [0] * 3, [4] * 3]
    assert stacked.loss.tolist() == [[0], [20], [0], [40]]
    assert stacked.loss.dtype == torch.float64
    assert stack(Answer, [None, None]) is None


@given(c=st.integers(1, 6))
def test_stack_undoes_select(c: int) -> None:
    message = Answer(torch.randn(c, 3), torch.randn(c, 1))
    again = stack(Answer, [message.select([i]) for i in range(c)])
    assert torch.equal(again.delta, message.delta)


# --- replies ----------------------------------------------------------------------------------------------------------


def test_means_are_over_the_answering_clients() -> None:
    r = replies([True, False, True], [1, 50, 3])
    assert r.mean_weights.tolist() == [0.5, 0, 0.5]
    assert r.weights.tolist() == [0.25, 0, 0.75]
    assert r.mean(r.delta).tolist() == [2.0] * 3
    assert r.mean(r.delta, r.weights).tolist() == [2.5] * 3
    assert r.total(r.loss) == 40.0
    assert len(r) == 3


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), min_size=1, max_size=8).filter(
        lambda found: any(here for here, _ in found)
    )
)
def test_a_weighted_mean_uses_only_present_rows(found: list[tuple[bool, int]]) -> None:
    present, sizes = [here for here, _ in found], [size for _, size in found]
    r = replies(present, sizes)
    values = torch.tensor([[i + 1.0] for i, here in enumerate(present) if here], dtype=torch.float64)
    counted = torch.tensor([size for here, size in found if here], dtype=torch.float64)
    torch.testing.assert_close(r.mean(r.loss), 10 * values.mean(0))
    assert r.mean_weights.sum() == pytest.approx(1)
    if counted.sum():
        torch.testing.assert_close(r.mean(r.loss, r.weights), 10 * (counted @ values / counted.sum()))
    else:
        assert not r.weights.any()


def test_values_of_absent_rows_are_never_read() -> None:
    r = replies([True, False], [1, 1])
    x = torch.tensor([[1.0], [torch.nan]])
    assert r.mean(x).tolist() == [1.0]


def test_sums_are_in_client_order() -> None:
    """To the bit: placement must not change results."""
    x = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    r = Replies(None, torch.ones(5, dtype=torch.bool), torch.ones(5))
    expected = torch.zeros(1000)
    for row in x:
        expected.add_(row, alpha=0.2)
    assert torch.equal(r.mean(x), expected)


def test_a_mean_without_answers() -> None:
    r: Replies[Answer] = Replies(None, torch.zeros(2, dtype=torch.bool), torch.tensor([3, 4]))
    assert not r.weights.any()
    assert not r.mean_weights.any()
    with pytest.raises(AttributeError):
        _ = r.delta


def test_a_missing_field_raises_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = replies([True], [1]).theta
    with pytest.raises(AttributeError):
        _ = replies([True], [1]).client_bytes


# --- validation of replies --------------------------------------------------------------------------------------------


class Update(Message):
    delta: Tensor = rows(Quantity.MODEL_UPDATE)
    steps: Tensor = rows(Quantity.COUNT)


class Broadcast(Message):
    x: Tensor = broadcast(Quantity.MODEL)


SHAPES = {
    Update: {"delta": (3,), "steps": ()},
    Broadcast: {"x": (2, 2)},
    Metrics: EvaluationPlan.of_classes(3).shapes(1),
}


def check(message, dtype=torch.float32):
    return fault(message, SHAPES, dtype)


def test_valid_replies_have_no_fault():
    assert check(Update(torch.zeros(1, 3), torch.zeros(1, dtype=torch.float64))) is None
    assert check(Update(torch.zeros(1, 3), torch.zeros(1))) is None
    assert check(Broadcast(torch.zeros(2, 2))) is None
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
    assert tells(fault(Broadcast(torch.zeros(1)), {Update: SHAPES[Update]}, torch.float32) or "", "Broadcast", "Update")


def test_a_sum_that_overflows_is_valid():
    largest = torch.finfo(torch.float32).max
    assert check(Update(torch.full((1, 3), largest), torch.zeros(1))) is None
    assert "not finite" in check(Update(torch.tensor([[largest, largest, float("nan")]]), torch.zeros(1)))
    assert "not finite" in check(Update(torch.tensor([[float("inf"), float("-inf"), 0.0]]), torch.zeros(1)))
