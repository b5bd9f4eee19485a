"""Refusals of a member when a round is repeated."""

from __future__ import annotations

import pytest
from facts import refusing

from fedloom.errors import RefusedError
from fedloom.federation.revealed_sums import RevealedSums, Subject

SUBJECT: Subject = (4, "train", "Update")


def test_the_same_sum_may_be_revealed_again() -> None:
    sums = RevealedSums()
    for _ in range(3):
        sums.check("a", SUBJECT, ["a", "b", "c", "d"])


@pytest.mark.parametrize("others", [["a", "b", "c"], ["a", "b", "c", "e"], ["a", "b", "c", "d", "e", "f"]])
def test_a_sum_that_differs_by_fewer_than_three_clients_is_refused(others: list[str]) -> None:
    sums = RevealedSums()
    sums.check("a", SUBJECT, ["a", "b", "c", "d"])
    with refusing(RefusedError, "a", 4):
        sums.check("a", SUBJECT, others)
    sums.check("a", (5, "train", "Update"), others)  # another round
    sums.check("b", SUBJECT, others)  # another client, which has revealed nothing


def test_two_sets_that_differ_by_enough_are_all() -> None:
    sums = RevealedSums()
    sums.check("a", SUBJECT, ["a", "b", "c", "d"])
    sums.check("a", SUBJECT, ["a", "e", "f", "g"])
    with refusing(RefusedError, "a"):
        sums.check("a", SUBJECT, ["a", "h", "i", "j"])


def test_the_oldest_rounds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.federation.revealed_sums.MOST_IDS", 9)
    sums = RevealedSums()
    for round in (1, 2, 3):
        for client in ("a", "b"):  # of one sum, which is remembered once
            sums.check(client, (round, "train", "Update"), ["a", "b", "c", "d"])
    sums.check("a", (1, "train", "Update"), ["a", "b", "c"])
    with refusing(RefusedError, "a", 3):
        sums.check("a", (3, "train", "Update"), ["a", "b", "c"])
