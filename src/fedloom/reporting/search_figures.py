"""Figures of a hyperparameter search: its trials, and each parameter, against the value on validation data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.reporting.drawing import COLOURS, FULL, as_svg, panel, percent
from fedloom.tasks.names import Headline

WIDE_RANGE = 30
"""Ratio of the largest to the smallest value above which a parameter has a logarithmic axis."""


@as_svg
def draw_trials(trials: Sequence[Mapping[str, Any]], chosen: int, headline: Headline) -> Figure:
    """Draw each finished trial's value on validation data, and the best so far."""
    figure, axes = panel(2.6, FULL)
    done = [trial for trial in trials if trial["validation"] is not None]
    x, y = [trial["trial"] for trial in done], [trial["validation"] for trial in done]
    best = headline.sign * np.maximum.accumulate(headline.sign * np.array(y))
    axes.step([*x, max(x) + 0.5], [*best, best[-1]], where="post", color=COLOURS["unseen"], label="best so far")
    _points(axes, x, y, x.index(chosen))
    axes.set(title=f"Validation {headline.title} of the trials", xlabel="trial", xlim=(0.5, trials[-1]["trial"] + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if headline.percent:
        percent(axes.yaxis)
    axes.legend(loc="best")
    return figure


@as_svg
def draw_parameter(trials: Sequence[Mapping[str, Any]], key: str, chosen: int, headline: Headline) -> Figure:
    """Draw the value on validation data against a parameter."""
    figure, axes = panel(2.6)
    done = [trial for trial in trials if trial["validation"] is not None]
    x = [trial["parameters"][key] for trial in done]
    _points(axes, x, [trial["validation"] for trial in done], [trial["trial"] for trial in done].index(chosen))
    axes.set(title=key, ylabel=f"validation {headline.title}")
    if min(x) > 0 and max(x) / min(x) > WIDE_RANGE:
        axes.set_xscale("log")
    if headline.percent:
        percent(axes.yaxis)
    return figure


def _points(axes: Axes, x: Sequence[float], y: Sequence[float], chosen: int) -> None:
    """Draw a dot for each trial, and a ring around the chosen one."""
    axes.plot(x, y, "o", color=COLOURS["seen"], markersize=4, linestyle="none")
    axes.plot([x[chosen]], [y[chosen]], "o", color=COLOURS["unseen"], markersize=9, fillstyle="none", label="chosen")
