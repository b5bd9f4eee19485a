"""Figures of a comparison, with the same style of each method in all of them, and of a hyperparameter search."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from fedloom.reporting.compare import FEATURED, GROUP_NAMES, LineStyle
from fedloom.reporting.drawing import (
    COLOURS,
    FULL,
    INK,
    around,
    as_svg,
    band,
    panel,
    percent,
    sheet,
)
from fedloom.reporting.page import FEWEST_POINTS
from fedloom.reporting.run_results import GROUPS, USERS, MeanStd, Row, differences, mean_std, own_steps_of
from fedloom.reporting.words import Document
from fedloom.tasks.names import Headline

_SPENT = (("rounds", "round"), ("communication", "payload, both directions"), ("client steps", "client steps"))


def has_curves(rows: Sequence[Row]) -> bool:
    """Return whether some row was evaluated often enough for a curve (:data:`FEWEST_POINTS`)."""
    return any(len(_curve(row, group)) >= FEWEST_POINTS for row in rows for group in _groups_and_users(rows))


@as_svg
def draw_curves(rows: Sequence[Row], styles: Mapping[str, LineStyle]) -> Figure:
    """Draw mean test results over rounds, bytes and client steps, with a row of panels per group.

    Lines are means over seeds, bands ± one standard deviation. A method evaluated only once, e.g. without rounds, is a
    horizontal line. The axis covers the values of trained rounds, up to 100 % for a percentage; an untrained model
    may lie outside. A single row is drawn over rounds only, because its other panels would look the same; so are more
    than :data:`FEATURED` rows.
    """
    groups = _groups_and_users(rows)
    axes_kinds = _SPENT if 1 < len(rows) <= FEATURED else _SPENT[:1]
    figure = sheet(FULL, 0.8 + (2.1 if len(rows) <= FEATURED else 3.4) * len(groups))
    grid = figure.subplots(len(groups), len(axes_kinds), sharex="col", sharey="row", squeeze=False)
    for group, line in zip(groups, grid, strict=True):
        _draw_curves_of(group, line, rows, styles)
    for top, bottom, (title, label) in zip(grid[0], grid[-1], axes_kinds, strict=True):
        in_bytes = title == "communication"
        top.set_title(f"Test {rows[0].headline.title} over {title}")
        bottom.set_xlabel(label)
        bottom.set_xlim(left=0)
        bottom.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=not in_bytes))
        bottom.xaxis.set_major_formatter(EngFormatter("B") if in_bytes else FuncFormatter(lambda x, _: f"{x:,.10g}"))
    _legend(figure, grid[0][0], grid[-1][0])
    return figure


def _draw_curves_of(group: str, line: Sequence[Axes], rows: Sequence[Row], styles: Mapping[str, LineStyle]) -> None:
    values = []
    for row in rows:
        curve = _curve(row, group)
        means = [point.mean for _, point in curve]
        values += means[1:] if len(means) > 2 else means
        for axes, x in zip(line, zip(*(x for x, _ in curve), strict=True), strict=False):
            _draw_curve(axes, x, [point for _, point in curve], styles[row.label], row.label)
    line[0].set_ylabel(GROUP_NAMES[group])
    if rows[0].headline.percent:
        line[0].set_ylim(max(0.0, min([0.95, *values]) - 0.05), 1.0)
        percent(line[0].yaxis)
    elif values:
        line[0].set_ylim(*around(values))


@as_svg
def draw_own_steps(rows: Sequence[Row], styles: Mapping[str, LineStyle]) -> Figure:
    """Draw test results of unseen clients over the number of their extra local steps.

    Lines are means over seeds; with several seeds, each also has a small dot. Steps are evenly spaced on the axis,
    whatever their values.
    """
    figure, axes = panel(3.4, FULL)
    ticks = own_steps_of(rows)
    for row in rows:
        results, look = row.own_steps, styles[row.label]
        x, means = [ticks.index(k) for k in results], [value.mean for value in results.values()]
        axes.plot(x, means, **look.line, marker=look.marker, markersize=5, label=row.label)
        for run in row.runs if len(row.runs) > 1 else ():
            dots = [run.own_steps[k].mean for k in results]
            axes.plot(x, dots, ".", color=look.colour, markersize=4, alpha=0.6)
    axes.set_xticks(range(len(ticks)), [str(k) for k in ticks])
    axes.set_xlabel("local steps of the client")
    axes.set_ylabel(f"test {rows[0].headline.title}")
    axes.set_title("Client never seen in training")
    if rows[0].headline.percent:
        percent(axes.yaxis)
    _legend(figure, axes)
    return figure


@as_svg
def draw_clients(rows: Sequence[Row], styles: Mapping[str, LineStyle]) -> Figure:
    """Draw the empirical distribution of the clients' test results in the last round, over all seeds."""
    groups = [group for group in _groups_and_users(rows) if group != USERS]
    figure = sheet(FULL, 3.1)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for group, axes in zip(groups, panels, strict=True):
        by_label = {row.label: sorted(row.client_values(group)) for row in rows}
        all_values = [value for values in by_label.values() for value in values]
        low, right = around(all_values or [0.0])
        end = right
        if rows[0].headline.percent:
            low, right, end = max(0.0, min([1.0, *all_values]) - 0.02), 1.005, 1.0
            percent(axes.xaxis)
        for label, values in by_label.items():
            if values:
                x, y = _steps(values)
                axes.plot([*x, end], [*y, 1.0], **styles[label].line, label=label)
        axes.set(title=f"{group.capitalize()} clients", xlabel=f"test {rows[0].headline.title}", ylim=(0, 1.01))
        axes.set_xlim(low, right)
        axes.grid(visible=True, axis="x")
    percent(panels[0].yaxis)
    panels[0].set_ylabel("share of clients at or below")
    _legend(figure, *panels)
    return figure


@as_svg
def draw_pairs(rows: Sequence[Row], styles: Mapping[str, LineStyle]) -> Figure:
    """Draw each method's difference to the best on average, client by client, sorted.

    A line crosses zero at the share of clients for which the best on average is not better.
    """
    panels = paired_differences(rows)
    figure = sheet(FULL, 3.2)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (group, best, lines) in zip(grid, panels, strict=True):
        axes.axhline(0, color=INK, linewidth=0.8)
        for label, values in lines.items():
            x, y = _steps(sorted(values))
            axes.plot(y, x, **styles[label].line, label=label)
        title = textwrap.fill(f"{group.capitalize()} clients: difference to {best.label}", 56)
        axes.set(title=title, xlabel="share of clients, sorted by difference", xlim=(0, 1))
        percent(axes.xaxis)
        factor = 100 if best.headline.percent else 1
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _, scale=factor: f"{scale * v:+.10g}" if v else "0"))
    grid[0].set_ylabel(f"difference in {rows[0].headline.title}" + (", points" if rows[0].headline.percent else ""))
    _legend(figure, *grid)
    return figure


def paired_differences(rows: Sequence[Row]) -> list[tuple[str, Row, dict[str, list[float]]]]:
    """Return for each group the best row, and the others' differences to it, client by client and by label.

    Groups in which no row shares clients with the best are left out.
    """
    panels = []
    for group in GROUPS:
        rows_measured = [row for row in rows if row.over_seeds(group) is not None]
        best = max(
            rows_measured, key=lambda row: row.headline.sign * row.mean(group), default=None
        )  # the first on ties
        if best is not None:
            lines = {
                row.label: [difference for of_seed in by_seed.values() for difference in of_seed]
                for row in rows
                if row is not best and (by_seed := differences(row, best, group))
            }
            if lines:
                panels.append((group, best, lines))
    return panels


def _groups_and_users(rows: Sequence[Row]) -> list[str]:
    """Return the groups for which some row has a result, user 0 first."""
    return [group for group in (USERS, *GROUPS) if any(row.over_seeds(group) is not None for row in rows)]


def _curve(row: Row, group: str) -> list[tuple[tuple[float, float, float], MeanStd]]:
    """Return (round, bytes, client steps) and value for rounds evaluated with every seed: means over seeds."""
    by_round = [{point.round: point for point in result.curve} for result in row.results]
    curve: list[tuple[tuple[float, float, float], MeanStd]] = []
    for number in sorted(set.intersection(*(set(points) for points in by_round))):
        points = [points[number] for points in by_round]
        if (value := mean_std(point.mean.get(group) for point in points)) is not None:
            n = len(points)
            x = (number, sum(p.payload for p in points) / n, sum(p.client_steps for p in points) / n)
            curve.append((x, value))
    return curve


def _draw_curve(axes: Axes, x: Sequence[float], points: Sequence[MeanStd], look: LineStyle, label: str) -> None:
    mean, std = [point.mean for point in points], [point.std or 0.0 for point in points]
    if len(points) == 1:
        if std[0]:
            axes.axhspan(mean[0] - std[0], mean[0] + std[0], color=look.colour, alpha=0.13, linewidth=0)
        axes.axhline(mean[0], **look.line, label=label)
        return
    if any(std):
        band(axes, x, mean, std, look.colour)
    every = max(1, len(x) // 12)
    axes.plot(x, mean, **look.line, marker=look.marker, markersize=3.2, markevery=every, label=label)


def _steps(ascending: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the corners of the step function of sorted values."""
    shares = np.arange(len(ascending) + 1) / len(ascending)
    return np.repeat(ascending, 2).tolist(), np.repeat(shares, 2)[1:-1].tolist()


def _legend(figure: Figure, *panels: Axes) -> None:
    """Add one legend for all panels below them; the figure grows by the height of lines beyond two."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    width = max((len(label) for label in handles), default=0) + 6
    columns = max(1, min(len(handles), 120 // width))
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, math.ceil(len(handles) / columns) - 2))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, handlelength=3.4)


WIDE_RANGE = 30
"""Ratio of the largest to the smallest value above which a parameter has a logarithmic axis."""


@as_svg
def draw_trials(trials: Sequence[Document], chosen: int, headline: Headline) -> Figure:
    """Draw each finished trial's value on validation data, and the best so far."""
    figure, axes = panel(2.6, FULL)
    finished = [trial for trial in trials if trial["validation"] is not None]
    x, y = [trial["trial"] for trial in finished], [trial["validation"] for trial in finished]
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
def draw_parameter(trials: Sequence[Document], key: str, chosen: int, headline: Headline) -> Figure:
    """Draw the value on validation data against a parameter."""
    figure, axes = panel(2.6)
    finished = [trial for trial in trials if trial["validation"] is not None]
    x = [trial["parameters"][key] for trial in finished]
    _points(axes, x, [trial["validation"] for trial in finished], [trial["trial"] for trial in finished].index(chosen))
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
