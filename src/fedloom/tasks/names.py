"""Names of tasks and of their headline metrics; reading a manifest imports this, without torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

TaskName: TypeAlias = Literal["classification", "multilabel", "regression", "segmentation", "next_token"]
"""Names of the tasks."""


class Headline(NamedTuple):
    """Metric by which rounds and methods are compared.

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
