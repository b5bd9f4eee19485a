"""The reliability diagram of a calibration document."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from fedloom.evaluation.uncertainty import BINS, edges
from fedloom.evaluation.uncertainty_figures import _groups, reliability


def rows(examples: int, accuracy: float) -> list[list[float]]:
    return [[0, 0.0, 0.0]] * (BINS - 1) + [[examples, 0.97, accuracy]]


def document(**groups: Any) -> dict[str, Any]:
    return {"round": 3, "edges": edges(), "personal": {"seen": None, "unseen": None}, "global": None} | groups


def test_the_global_curve_is_over_the_examples_of_both_groups() -> None:
    shared = {"seen": rows(30, 1.0), "unseen": rows(10, 0.6)}
    found = _groups(document(**{"global": shared}))
    assert list(found) == ["global"]
    assert found["global"][-1] == pytest.approx([40, 0.97, 0.9])
    assert found["global"][0] == [0, 0, 0]


def test_only_what_there_is_is_drawn_the_same_bytes_every_time() -> None:
    whole = document(personal={"seen": rows(5, 1.0), "unseen": rows(5, 0.5)}, **{"global": {"seen": rows(5, 0.1)}})
    picture = reliability(whole)
    assert picture == reliability(whole)
    ElementTree.fromstring(picture)
    for label in ("seen clients", "unseen clients", "global model"):
        assert label in picture
    alone = reliability(document(personal={"seen": rows(5, 1.0), "unseen": None}))
    assert "unseen clients" not in alone
    assert "global model" not in alone
    ElementTree.fromstring(reliability(document()))
