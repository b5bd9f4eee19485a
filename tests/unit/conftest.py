"""Fixtures of unit tests."""

from __future__ import annotations

import pytest

from fedloom.models.flat import FlatModel
from fedloom.tasks.classification import CLASSIFICATION
from fedloom.tasks.multilabel import Multilabel
from fedloom.tasks.regression import Regression


@pytest.fixture(params=[CLASSIFICATION, Multilabel(), Regression()], ids=lambda task: task.name)
def each_task(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all models a task, from which ``federations`` generates targets and computes losses."""
    monkeypatch.setattr(FlatModel, "task", request.param)
