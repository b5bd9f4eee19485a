"""Figures of attacks, from ``audit.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fedloom.reporting.drawing import COLOURS, INK, as_svg, panel

LOWEST = 1e-3
"""Lowest rate on the logarithmic axes."""


@as_svg
def draw_membership(membership: Mapping[str, Any]) -> Figure:
    """Draw true against false positive rates of membership inference, on logarithmic axes; the diagonal is chance."""
    figure, axes = panel(3.3)
    axes.plot([LOWEST, 1], [LOWEST, 1], color=INK, linewidth=0.7, alpha=0.5)
    for name, groups in membership["predictors"].items():
        for group, result in groups.items():
            if result is not None:
                fpr, tpr = (np.maximum(rates, LOWEST) for rates in np.array(result["curve"]).T)
                dash = "-" if name == "personal" else "--"
                axes.plot(fpr, tpr, color=COLOURS[group], linestyle=dash, label=f"{name}, {group} clients")
    axes.set(
        title="Membership inference", xlabel="false positive rate", ylabel="true positive rate",
        xscale="log", yscale="log", xlim=(LOWEST, 1), ylim=(LOWEST, 1.05),
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([LOWEST, 0.01, 0.1, 1]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%"))
    axes.grid(visible=True, axis="both")
    axes.legend(loc="upper left")
    return figure
