"""Figures of a comparison; each method has the same colour, line style and marker in all of them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from fedloom.reporting.compare import FEATURED
from fedloom.reporting.compare_findings import GROUP_NAMES
from fedloom.reporting.compare_rows import MeanStd, Row, differences, mean_std, own_steps_of
from fedloom.reporting.drawing import (
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
from fedloom.reporting.run_results import GROUPS, USERS

COLOURS = {
    "m0": "#0072b2", "m1": "#d55e00", "m2": "#009e73", "m3": "#cc79a7",
    "m4": "#e69f00", "m5": "#56b4e9", "m6": "#7f3c8d", "m7": "#8c6d31",
}  # fmt: skip
"""Colours by CSS variable of the page: Okabe and Ito's, and two more as dark as the first."""

DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (1.5, 1.5), (6, 2, 1.5, 2), (10, 3), (3, 1.5, 1.5, 1.5, 1.5, 1.5))
MARKERS = "os^DvPX"

_SPENT = (("rounds", "round"), ("communication", "payload, both directions"), ("client steps", "client steps"))


@dataclass(frozen=True)
class LineStyle:
    """Drawing style of a method; after eight methods, colours repeat with other line styles and markers."""

    name: str
    dash: tuple[float, ...]
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of ``plot``."""
        return {"color": COLOURS[self.name], "linestyle": (0, self.dash) if self.dash else "-"}

    @property
    def key(self) -> dict[str, str]:
        """Colour and dash pattern of a table's row; the line has a width of 2."""
        return {"colour": self.name, "dash": " ".join(f"{2 * length:g}" for length in self.dash)}


def line_styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """Return a style for each label, in order of appearance."""
    distinct = list(dict.fromkeys(labels))
    return {
        label: LineStyle(f"m{i % len(COLOURS)}", DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, label in enumerate(distinct)
    }


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
    shown = _groups_and_users(rows)
    over = _SPENT if 1 < len(rows) <= FEATURED else _SPENT[:1]
    figure = sheet(FULL, 0.8 + (2.1 if len(rows) <= FEATURED else 3.4) * len(shown))
    grid = figure.subplots(len(shown), len(over), sharex="col", sharey="row", squeeze=False)
    for group, line in zip(shown, grid, strict=True):
        _draw_curves_of(group, line, rows, styles)
    for top, bottom, (title, label) in zip(grid[0], grid[-1], over, strict=True):
        in_bytes = title == "communication"
        top.set_title(f"Test {rows[0].headline.title} over {title}")
        bottom.set_xlabel(label)
        bottom.set_xlim(left=0)
        bottom.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=not in_bytes))
        bottom.xaxis.set_major_formatter(EngFormatter("B") if in_bytes else FuncFormatter(lambda x, _: f"{x:,.10g}"))
    _legend(figure, grid[0][0], grid[-1][0])
    return figure


def _draw_curves_of(group: str, line: Sequence[Axes], rows: Sequence[Row], styles: Mapping[str, LineStyle]) -> None:
    trained = []
    for row in rows:
        curve = _curve(row, group)
        means = [point.mean for _, point in curve]
        trained += means[1:] if len(means) > 2 else means
        for k, axes in enumerate(line if curve else ()):
            _draw_curve(axes, [(x[k], point) for x, point in curve], styles[row.label], row.label)
    line[0].set_ylabel(GROUP_NAMES[group])
    if rows[0].headline.percent:
        line[0].set_ylim(max(0.0, min([0.95, *trained]) - 0.05), 1.0)
        percent(line[0].yaxis)
    elif trained:
        line[0].set_ylim(*around(trained))


@as_svg
def draw_own_steps(rows: Sequence[Row], styles: Mapping[str, LineStyle]) -> Figure:
    """Draw test results of unseen clients over the number of their extra local steps.

    Lines are means over seeds; with several seeds, each also has a small dot. Steps are evenly spaced on the axis,
    whatever their values.
    """
    figure, axes = panel(3.4, FULL)
    ticks = own_steps_of(rows)
    for row in rows:
        found, look = row.own_steps, styles[row.label]
        x = [ticks.index(k) for k in found]
        axes.plot(x, [v.mean for v in found.values()], **look.line, marker=look.marker, markersize=5, label=row.label)
        for run in row.runs if len(row.runs) > 1 else ():
            dots = [run.own_steps[k].mean for k in found]
            axes.plot(x, dots, ".", color=COLOURS[look.name], markersize=4, alpha=0.6)
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
    shown = [group for group in _groups_and_users(rows) if group != USERS]
    figure = sheet(FULL, 3.1)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for group, axes in zip(shown, panels, strict=True):
        values = {row.label: sorted(row.client_values(group)) for row in rows}
        all_values = [value for found in values.values() for value in found]
        left, right = around(all_values or [0.0])
        if rows[0].headline.percent:
            left, right = max(0.0, min([1.0, *all_values]) - 0.02), 1.005
            percent(axes.xaxis)
        for label, found in values.items():
            if found:
                x, y = _steps(found)
                axes.plot(
                    [*x, min(1.0, right) if rows[0].headline.percent else right],
                    [*y, 1.0],
                    **styles[label].line,
                    label=label,
                )
        axes.set(title=f"{group.capitalize()} clients", xlabel=f"test {rows[0].headline.title}", ylim=(0, 1.01))
        axes.set_xlim(left, right)
        axes.grid(visible=True, axis="x")
    percent(panels[0].yaxis)
    panels[0].set_ylabel("share of clients at or below")
    _legend(figure, *panels)
    return figure


def has_pairs(rows: Sequence[Row]) -> bool:
    """Return whether :func:`draw_pairs` has data: some row shares clients with the best."""
    return bool(_panels(rows))


@as_svg
def draw_pairs(rows: Sequence[Row], styles: Mapping[str, LineStyle]) -> Figure:
    """Draw each method's difference to the best on average, client by client, sorted.

    A line crosses zero at the share of clients for which the best on average is not better.
    """
    panels = _panels(rows)
    figure = sheet(FULL, 3.2)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (group, best, lines) in zip(grid, panels, strict=True):
        axes.axhline(0, color=INK, linewidth=0.8)
        for label, found in lines.items():
            x, y = _steps(sorted(found))
            axes.plot(y, x, **styles[label].line, label=label)
        title = textwrap.fill(f"{group.capitalize()} clients: difference to {best.label}", 56)
        axes.set(title=title, xlabel="share of clients, sorted by difference", xlim=(0, 1))
        percent(axes.xaxis)
        factor = 100 if best.headline.percent else 1
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _, by=factor: f"{by * v:+.10g}" if v else "0"))
    grid[0].set_ylabel(f"difference in {rows[0].headline.title}" + (", points" if rows[0].headline.percent else ""))
    _legend(figure, *grid)
    return figure


def _panels(rows: Sequence[Row]) -> list[tuple[str, Row, dict[str, list[float]]]]:
    """Return for each group the best row, and the others' differences to it, client by client and by label."""
    found = []
    for group in GROUPS:
        measured = [row for row in rows if row.over_seeds(group) is not None]
        best = max(measured, key=lambda row: row.headline.sign * row.mean(group), default=None)  # the first on ties
        if best is not None:
            lines = {
                row.label: [d for of_seed in differences(row, best, group).values() for d in of_seed]
                for row in rows
                if row is not best
            }
            lines = {label: values for label, values in lines.items() if values}
            if lines:
                found.append((group, best, lines))
    return found


def _groups_and_users(rows: Sequence[Row]) -> list[str]:
    """Return the groups for which some row has a result, user 0 first."""
    return [group for group in (USERS, *GROUPS) if any(row.over_seeds(group) is not None for row in rows)]


def _curve(row: Row, group: str) -> list[tuple[tuple[float, float, float], MeanStd]]:
    """Return (round, bytes, client steps) and value for rounds evaluated with every seed: means over seeds."""
    by_round = [{point.round: point for point in result.curve} for result in row.results]
    found: list[tuple[tuple[float, float, float], MeanStd]] = []
    for number in sorted(set.intersection(*(set(points) for points in by_round))):
        points = [points[number] for points in by_round]
        value = mean_std(point.mean.get(group) for point in points)
        if value is not None:
            n = len(points)
            x = (number, sum(p.payload for p in points) / n, sum(p.client_steps for p in points) / n)
            found.append((x, value))
    return found


def _draw_curve(axes: Axes, curve: Sequence[tuple[float, MeanStd]], look: LineStyle, label: str) -> None:
    x = [x for x, _ in curve]
    mean = [point.mean for _, point in curve]
    std = [point.std or 0.0 for _, point in curve]
    if len(curve) == 1:
        if std[0]:
            axes.axhspan(mean[0] - std[0], mean[0] + std[0], color=COLOURS[look.name], alpha=0.13, linewidth=0)
        axes.axhline(mean[0], **look.line, label=label)
        return
    if any(std):
        band(axes, x, mean, std, COLOURS[look.name])
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
