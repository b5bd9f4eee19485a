"""Names of tasks and of their metrics; reading a manifest imports this, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

TaskName: TypeAlias = Literal["classification", "multilabel", "regression", "segmentation", "next_token"]
"""Names of the tasks."""


ABBREVIATIONS = {
    "auroc": "AUROC", "brier": "Brier", "dice": "Dice", "ece": "ECE", "f1": "F1", "iou": "IoU", "mae": "MAE",
    "mse": "MSE", "r2": "R²", "rmse": "RMSE",
}  # fmt: skip
"""Parts of metrics' names that are not ordinary words, and how tables write them."""


def metric_title(name: str) -> str:
    """Return a metric's name as the heading of a column, e.g. ``macro AUROC`` for ``macro_auroc``."""
    return " ".join(ABBREVIATIONS.get(part, part) for part in name.split("_"))


def significant(value: float) -> str:
    """Return a number with four significant digits, and a large one as a whole number."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


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

    @property
    def title(self) -> str:
        """Name in sentences and figures."""
        return metric_title(self.name)

    @property
    def capitalized(self) -> str:
        """Name at the beginning of a sentence."""
        return f"{self.title[0].upper()}{self.title[1:]}"

    @property
    def heading(self) -> str:
        """Name with its unit, for a table's column."""
        return f"{self.title}, %" if self.percent else self.title

    @property
    def unit(self) -> str:
        """Unit that follows a value in a sentence; empty without one."""
        return " %" if self.percent else ""

    @property
    def sign(self) -> int:
        """Factor that makes higher values better: 1, or -1 where lower ones are."""
        return 1 if self.higher_is_better else -1

    @property
    def superlative(self) -> str:
        """Adjective of the best value."""
        return "highest" if self.higher_is_better else "lowest"

    @property
    def inferior(self) -> str:
        """Adjective of the worst value."""
        return "lowest" if self.higher_is_better else "highest"

    def shown(self, value: float) -> str:
        """Return a value for a table under :attr:`heading`: in percent with one decimal, or four significant digits."""
        return f"{100 * value:.1f}" if self.percent else significant(value)

    def shown_difference(self, difference: float) -> str:
        """Return a difference with its sign, in percentage points or with three digits."""
        if not difference:
            return "0"
        return f"{100 * difference:+.1f}" if self.percent else f"{difference:+.3g}"

    def exact(self, value: float) -> str:
        """Return a value for a line of text: a fraction with four decimals, or four significant digits."""
        return f"{value:.4f}" if self.percent else significant(value)


def _named(names: str, *, higher_is_better: bool, percent: bool) -> dict[str, Headline]:
    return {name: Headline(name, higher_is_better, percent) for name in names.split()}


METRICS: Mapping[str, Headline] = {
    **_named("accuracy balanced_accuracy micro_f1 macro_f1 exact_match", higher_is_better=True, percent=True),
    **_named("mean_iou dice pixel_accuracy", higher_is_better=True, percent=True),
    **_named("auroc r2", higher_is_better=True, percent=False),
    **_named("log_loss brier ece rmse mae mse perplexity loss", higher_is_better=False, percent=False),
}
"""Metrics of FedLoom's tasks, by name."""

IGNORED: Mapping[TaskName, int] = {"segmentation": 255, "next_token": -100}
"""Default values of targets that are left out: pixels without a class, padding."""

ALIASES: Mapping[str, str] = {
    "f1": "macro_f1",
    "auc": "auroc",
    "iou": "mean_iou",
    "cross_entropy": "log_loss",
}
"""Other names of metrics that an experiment may ask for."""

ACCURACY = METRICS["accuracy"]
"""Headline metric of classification."""

MODEL_LOSS = METRICS["loss"]
"""Headline metric of a model that is trained by its own loss on data without targets."""


def metric_heading(metric: str) -> str:
    """Return a metric's name with its unit, for a table's column."""
    return METRICS[metric].heading if metric in METRICS else metric_title(metric)


def shown_metric(metric: str, value: float) -> str:
    """Return a metric's value for a column under :func:`metric_heading`."""
    return METRICS[metric].shown(value) if metric in METRICS else significant(value)
