"""Names of tasks and of their metrics; reading a manifest imports this, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

TaskName: TypeAlias = Literal["classification", "multilabel", "regression", "segmentation", "next_token"]
"""Names of the tasks."""


class Headline(NamedTuple):
    """Metric, such as the one by which rounds and methods are compared.

    Attributes
    ----------
    name
        Its key under ``metrics``.
    higher_is_better
        False for errors and losses.
    percent
        True if it is a fraction that tables show in percent.
    """

    name: str
    higher_is_better: bool
    percent: bool


def _named(names: str, *, higher_is_better: bool, percent: bool) -> dict[str, Headline]:
    return {name: Headline(name, higher_is_better, percent) for name in names.split()}


METRICS: Mapping[str, Headline] = {
    **_named("accuracy balanced_accuracy micro_f1 macro_f1 exact_match", higher_is_better=True, percent=True),
    **_named("mean_iou dice pixel_accuracy", higher_is_better=True, percent=True),
    **_named("auroc r2", higher_is_better=True, percent=False),
    **_named("log_loss brier ece rmse mae mse perplexity loss", higher_is_better=False, percent=False),
}
"""The tasks' own metrics by name."""

IGNORED: Mapping[TaskName, int] = {"segmentation": 255, "next_token": -100}
"""Default values of targets that are left out: pixels without a class, padding."""

ALIASES: Mapping[str, str] = {
    "f1": "macro_f1",
    "auc": "auroc",
    "iou": "mean_iou",
    "cross_entropy": "log_loss",
}
"""Other names of metrics that an experiment may ask for."""
