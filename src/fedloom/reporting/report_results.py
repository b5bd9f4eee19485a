"""Sections of a report on the quality of models, for every task: learning curves, results, clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.errors import DataError
from fedloom.reporting.drawing import (
    COLOURS,
    INK,
    MANY_POINTS,
    MANY_ROUNDS,
    Array,
    around,
    as_svg,
    band,
    dots,
    neighbours,
    over_rounds,
    panel,
    percent,
)
from fedloom.reporting.page import (
    DASH,
    FEWEST_POINTS,
    Column,
    Panel,
    Part,
    Table,
    TableRow,
    one_block,
    table_row,
    tabulated,
)
from fedloom.reporting.report_setup import summary_of
from fedloom.reporting.run_results import GROUPS
from fedloom.reporting.words import GROUP_TITLES, ClientRow, Document, client_column, is_masked
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import (
    ACCURACY,
    MODEL_LOSS,
    Headline,
    headline_of,
    metric_heading,
    metrics_of,
    shown_metric,
    significant,
    values_of,
)

NAMED = 10
"""Maximum number of rows of a small table."""


FEW_CLIENTS = 20
"""Maximum number of clients that are all listed by name."""


MANY_METRICS = 3
"""Maximum number of metrics in a small table of clients; one of more takes the full width."""


def has_classes(run: RunFolder) -> bool:
    """Return whether the run's data have classes; True if its partition cannot be read."""
    try:
        return run.manifest().spec.classes > 0
    except DataError:
        return True


def learning_curves(run: RunFolder) -> Part:
    """Return test results and training loss over rounds."""
    lines, losses = run.metrics(), run.training_loss()
    if not lines:
        raise DataError(f"{run.path / 'metrics.jsonl'}: has no evaluated round")
    panels, text = [], []
    if len(lines) < FEWEST_POINTS:
        rounds = ", ".join(str(line["round"]) for line in lines)
        text.append(f"Evaluated rounds: {rounds}. A curve of test results needs {FEWEST_POINTS} or more.")
    else:
        headline = headline_of(lines[-1])
        panels.append(Panel("learning-curve", draw_learning_curve(lines, headline)))
        text.append(_about_curve(headline))
    if len(losses) >= FEWEST_POINTS:
        panels.append(Panel("training-loss", draw_training_loss(losses)))
        text.append("Training: the method's own loss, mean over the cohort of each round.")
    return Part(panels=tuple(panels), columns=2, text=" ".join(text))


def _about_curve(headline: Headline) -> str:
    if headline == ACCURACY:
        return "Test: mean of the clients' accuracies, ± one standard deviation over clients."
    if headline == MODEL_LOSS:
        return "Test: mean of the clients' losses. The loss is the model's own, as the data have no classes."
    better = "higher" if headline.higher_is_better else "lower"
    return (
        f"Test: mean of the clients' {headline.title}, ± one standard deviation over clients; {better} is better. "
        "An untrained model may lie outside the figure."
    )


def result_table(run: RunFolder) -> Part:
    """Return the results table: the last round in both readings, and the best round."""
    lines = run.metrics()
    if not lines:
        raise DataError(f"{run.path / 'metrics.jsonl'}: has no evaluated round")
    last, best, headline, main = lines[-1], _best(run), headline_of(lines[-1]), main_reading(run)
    other = "unmasked" if main == "masked" else "masked"
    is_best = best is not None and best["round"] == last["round"]
    caption = f"Round {last['round']} ({'last and best by validation' if is_best else 'last'})"
    suffix = f", {main}" if headline == ACCURACY else ""
    blocks = [(f"{caption}{suffix}", _rows(last, headline))]
    otherwise = _other_reading(last, other)
    if any(otherwise.values()):
        blocks.append((f"{caption}, {other}", _rows(otherwise, headline)))
    if best is not None and not is_best:
        blocks.append((f"Round {best['round']} (best by validation){suffix}", _rows(best, headline)))
    headings = (f"test {headline.heading}", "clients", "mean ± std", "worst", "worst decile", "pooled", "loss")
    tables = (Table(headings, tuple(blocks)), *_all_metrics(last, headline))
    notes = (_about_results(headline), *_about_macro(last), *_last_evaluations(run, headline), *_spread(last))
    return Part(tables=tables, text=" ".join(notes))


def _spread(line: Document) -> list[str]:
    """Return a sentence on the spread of the clients' models, if it was measured."""
    groups = {key: group for key, group in line.get("spread", {}).items() if group and group["relative"] is not None}
    if not groups:
        return []
    parts = [f"{GROUP_TITLES[key]} {100 * group['relative']:.2g} %" for key, group in groups.items()]
    return [
        f"Distance of the clients' models from their mean (root mean square, relative to the norm of the mean): "
        f"{', '.join(parts)}; 0 if all clients have the same model."
    ]


def _about_results(headline: Headline) -> str:
    pooled = "Pooled: over all clients' examples together. Loss: mean over clients, as in training."
    if headline == ACCURACY:
        pooled = (
            "Pooled: correct predictions over examples. Masked: only the labels of the client's own training data can "
            "be predicted. Loss: mean over clients, in nats."
        )
    criterion = f"pooled validation {headline.title}"
    return (
        "Each client counts once in mean, std (population) and worst. Worst decile: mean of the worst tenth of clients "
        f"(rounded up). {pooled} The best round has the {headline.superlative} {criterion} of seen clients, the "
        "earliest on ties; test data are not used to choose it."
    )


def _about_macro(line: Document) -> list[str]:
    """Return a sentence on macro F1, if it is in the table."""
    if not any("macro_f1" in metrics_of(line[key]) for key in GROUP_TITLES if line[key] is not None):
        return []
    return [
        "Macro F1 of a client: mean over the classes (or labels) that it has or that are predicted for it. One wrong "
        "prediction of a class that it does not have counts as a class of F1 0, so where clients have few of the "
        "classes, the mean of macro F1 is far below that of accuracy; the pooled one is not."
    ]


def _all_metrics(line: Document, headline: Headline) -> tuple[Table, ...]:
    """Return a table of every metric of the task; none if the headline metric is the only one."""
    groups = {key: metrics_of(line[key]) for key in GROUP_TITLES if line[key] is not None}
    names = dict.fromkeys(name for metrics in groups.values() for name in metrics if name != MODEL_LOSS.name)
    if not names.keys() - {headline.name}:
        return ()

    def column(key: str, statistic: str) -> Column[str]:
        def cell(name: str) -> str:
            return _shown(name, getattr(groups[key].get(name), statistic, None))

        return Column(statistic.replace("_", " "), cell, GROUP_TITLES[key])

    columns = [column(key, statistic) for key in groups for statistic in ("mean", "worst_decile", "pooled")]
    blocks = [(f"Round {line['round']}, every metric", names)]
    return (tabulated([Column("test metric", metric_heading), *columns], blocks),)


def _shown(name: str, value: float | None) -> str:
    return DASH if value is None else shown_metric(name, value)


def _last_evaluations(run: RunFolder, headline: Headline) -> list[str]:
    """Return a sentence on the last evaluations together, if the run is finished and has several."""
    late = summary_of(run).get("last_evaluations")
    if late is None or late["evaluations"] < 2:  # a run in progress
        return []
    means = []
    for key, label in GROUP_TITLES.items():
        statistics = (late[key] or {}).get(f"{headline.name}_mean")
        if statistics is not None:
            mean, *ends = (headline.shown(statistics[name]) for name in ("mean", "lowest", "highest"))
            means.append(f"{label} {mean} ({' to '.join(ends)})")
    if not means:
        return []
    first, last = late["rounds"]
    return [
        f"Mean of the last {late['evaluations']} evaluations, rounds {first} to {last} (lowest to highest)"
        f"{', in percent' if headline.percent else ''}: {'; '.join(means)}. Reporting the {headline.superlative} of "
        "several evaluations would amount to choosing by test data."
    ]


def _best(run: RunFolder) -> Document | None:
    """Return the best round; for a finished run it is in the summary, so that torch is not needed."""
    if summary := summary_of(run):
        best: Document | None = summary["best"]
        return best
    from fedloom.evaluation import summary as summaries

    return summaries.best(run.evaluations())


def _other_reading(groups: Document, other: str) -> dict[str, Any]:
    """Return the groups of a line in the other reading, None where there is none."""
    otherwise = {key: (groups.get(key) or {}).get(other) for key in GROUP_TITLES}
    if otherwise["global"] is not None:
        otherwise["global"] = {**_other_reading(groups["global"], other), **otherwise["global"]}
    return otherwise


def _rows(groups: Document, headline: Headline) -> tuple[TableRow, ...]:
    titles = {key: f"{key} clients" for key in GROUPS}
    rows = [(f"{title}, personalized model", groups[key], key) for key, title in titles.items()]
    if (overall := groups["global"]) is not None:
        rows.append(("all clients, global model", overall, "global"))
        rows += [(title, overall[key], "") for key, title in titles.items() if overall[key] is not None]
    return tuple(table_row(title, *_cells(group, headline), colour=colour) for title, group, colour in rows)


def _cells(group: Document | None, headline: Headline) -> tuple[str, ...]:
    if group is None:
        return (DASH,) * 6
    mean, std, *others = (DASH if value is None else headline.shown(value) for value in values_of(group, headline))
    loss = f"{group['loss_mean']:.3f}" if headline == ACCURACY else significant(group["loss_mean"])
    return (str(group["clients"]), mean if std == DASH else f"{mean} ± {std}", *others, loss)


def last_line(run: RunFolder) -> Document:
    """Return the last evaluation; empty without one."""
    line, _ = run.last_evaluation() or ({}, 0)
    return line


def main_reading(run: RunFolder) -> str:
    """Return the primary reading, ``masked`` or ``unmasked``."""
    last = last_line(run)
    return "masked" if any(is_masked(last[key]) for key in GROUPS if last.get(key)) else "unmasked"


def client_results(run: RunFolder) -> Part:
    """Return the distribution of results over clients, and the clients with the lowest ones."""
    rows, reading, headline = run.clients(), main_reading(run), headline_of(last_line(run))
    if not any(row[client_column("personal", headline.name, reading)] for row in rows):
        return Part(text="No client's own results are known: metrics were summed securely, or no client was measured.")
    panels = [Panel("clients", draw_distribution(rows, headline, reading))]
    right, thick = ("right", "foot") if headline.higher_is_better else ("left", "top")
    caption, value = ("last evaluation", "a value")
    if headline == ACCURACY:
        caption, value = f"{reading}, {caption}", "an accuracy"
    text = (
        f"Each client's test {headline.title} ({caption}). Distribution: the share of clients at or below {value}, so "
        f"{right} is better. The thick {thick} of a line is the worst decile."
    )
    tables = [_worst(rows, headline, reading, _class_names(run))]
    if client_column("global", headline.name, reading) in rows[0]:
        panels.append(Panel("personalization", draw_gains(rows, headline, reading)))
        tables.append(_changed(rows, headline, reading))
        side = "above" if headline.higher_is_better else "below"
        text += f" Gain: {side} the diagonal, the personalized model is better on the client's test data."
    return Part(panels=tuple(panels), tables=tuple(tables), columns=2, text=text)


def small_table(title: str, headings: tuple[str, ...], rows: Sequence[TableRow], *, wide: bool = False) -> Table:
    """Return a table for the grid of the figures."""
    return one_block(headings, rows, title, small=True, wide=wide)


def _worst(rows: Sequence[ClientRow], headline: Headline, reading: str, names: Mapping[str, str]) -> Table:
    """Return a table of every metric of the clients with the worst results, or of all clients if they are few."""
    column = client_column("personal", headline.name, reading)
    rows_measured = _measured(rows, column)
    rows_measured.sort(key=lambda row: (headline.sign * float(row[column]), row["id"]))
    few = len(rows_measured) <= FEW_CLIENTS
    columns = {headline.name: column}
    if headline != ACCURACY:  # every metric that some client has; the loss only if it is the headline
        shown_columns = dict.fromkeys(key for row in rows_measured for key in row if row[key])
        by_name = {key.removeprefix("personal_").removesuffix(f"_{reading}"): key for key in shown_columns}
        columns |= {
            name: key
            for name, key in by_name.items()
            if key == client_column("personal", name, reading) and name != MODEL_LOSS.name
        }
    table_rows = []
    for row in rows_measured if few else rows_measured[: min(NAMED, math.ceil(len(rows_measured) / 10))]:
        cells = [_shown(name, float(row[key]) if row[key] else None) for name, key in columns.items()]
        classes = [_classes(row["labels"].split(), names)] if names else []
        table_rows.append(client_row(row, *cells, row["train"], *classes))
    label = f"{headline.inferior} {headline.title}"
    title = f"Clients, {label} first" if few else f"Clients of {label}"
    headings = ("client", *map(metric_heading, columns), "training examples", *(["classes"] if names else []))
    return small_table(title, headings, table_rows, wide=len(columns) > MANY_METRICS)


def _changed(rows: Sequence[ClientRow], headline: Headline, reading: str) -> Table:
    """Return a table of the clients with the largest losses and gains from personalization."""
    global_column, personal_column = (
        client_column(predictor, headline.name, reading) for predictor in ("global", "personal")
    )
    gains = [
        (headline.sign * (float(row[personal_column]) - float(row[global_column])), row["id"], row)
        for row in _measured(_measured(rows, global_column), personal_column)
    ]
    gains.sort(key=lambda each: each[:2])
    half = min(NAMED // 2, len(gains) // 2)
    table_rows = []
    for gain, _, row in gains[:half] + gains[len(gains) - half :]:
        points = f"{100 * gain:+.1f}" if headline.percent else f"{gain:+.3g}"
        table_rows.append(
            client_row(
                row, *(headline.shown(float(row[column])) for column in (global_column, personal_column)), points
            )
        )
    headings = ("client", "global, %", "personalized, %", "gain, points")
    if not headline.percent:
        gain_of = "gain" if headline.higher_is_better else f"{headline.title} saved"
        headings = ("client", "global", "personalized", gain_of)
    return small_table("Smallest and largest gains by personalization", headings, table_rows)


def client_row(row: ClientRow, *cells: str) -> TableRow:
    """Return a client's row: its id, cells, the colour of its group and its owner."""
    return table_row(row["id"], *cells, colour=group_of(row), note=owner_of(row))


def group_of(row: ClientRow) -> str:
    """Return the group of a client, by its line of ``clients.csv``."""
    return "seen" if row["seen"] == "true" else "unseen"


def owner_of(row: ClientRow) -> str:
    """Return the name of a client's owner; empty if it is the client's id."""
    owner = row.get("owner", "")
    return owner if owner != row["id"] else ""


def _classes(labels: Sequence[str], names: Mapping[str, str]) -> str:
    """Return the names of a client's classes if there are at most two, else their number."""
    return ", ".join(names.get(label, label) for label in labels) if len(labels) <= 2 else str(len(labels))


def _class_names(run: RunFolder) -> dict[str, str]:
    """Return class names by number; empty if the partition cannot be read."""
    try:
        spec = run.manifest().spec
    except DataError:
        return {}
    return {str(k): name for k, name in enumerate(spec.class_names[: spec.classes])}


@as_svg
def draw_learning_curve(lines: Sequence[Document], headline: Headline) -> Figure:
    """Draw the mean of the headline metric on test data over rounds, with a band of ± one standard deviation.

    Axes of fractions begin at zero; others show the trained rounds, and an untrained model may lie outside.
    """
    figure, axes = panel(2.6)
    groups_drawn = [_draw_group(axes, lines, name, headline) for name in COLOURS]
    over_rounds(axes, lines[-1]["round"])
    axes.set(title=f"Test {headline.title}", ylabel="mean over clients")
    if headline.percent:
        top = max((top for _, top in groups_drawn), default=0.0)
        axes.set_ylim(0, min(1.0, math.ceil(10 * top + 0.5) / 10))
        percent(axes.yaxis)
    elif len(values_trained := [value for values, _ in groups_drawn for value in values]) > 1:
        axes.set_ylim(*around(values_trained))
    axes.legend(loc="lower right" if headline.percent else "best")
    return figure


def _draw_group(axes: Axes, lines: Sequence[Document], name: str, headline: Headline) -> tuple[list[float], float]:
    """Draw a group's learning curve; return its means of trained rounds, and the upper end of its band."""
    groups = {line["round"]: values_of(line[name], headline) for line in lines if line[name] is not None}
    evaluations = {number: values for number, values in groups.items() if values.mean is not None}
    if not evaluations:
        return [], 0.0
    x, std = list(evaluations), [values.std for values in evaluations.values()]
    mean = np.array([values.mean for values in evaluations.values()], dtype=np.float64)
    top, colour = 0.0, COLOURS[name]
    if None not in std:
        limits = (0.0, 1.0) if headline.percent else (-math.inf, math.inf)
        _, high = band(axes, x, mean, np.array(std, dtype=np.float64), colour, limits)
        top = float(high.max())
    dash, marker = "--" if name == "global" else "-", "o" if len(evaluations) <= 25 else None
    clipped = not headline.percent
    axes.plot(x, mean, dash, color=colour, marker=marker, markersize=2.6, label=GROUP_TITLES[name], clip_on=clipped)
    return [value for number, value in zip(x, mean.tolist(), strict=True) if number], top


@as_svg
def draw_training_loss(losses: Mapping[int, float]) -> Figure:
    """Draw training loss over rounds; beyond :data:`MANY_ROUNDS`, the line shows means of adjacent rounds."""
    figure, axes = panel(2.6)
    if len(losses) > MANY_ROUNDS:
        axes.plot([*losses], [*losses.values()], color=COLOURS["seen"], linewidth=0.6, alpha=0.3)
    marker = "o" if len(losses) <= 25 else None
    means = neighbours([*losses.values()])
    axes.plot(neighbours([*losses]), means, color=COLOURS["seen"], marker=marker, markersize=2.6)
    axes.set(title="Training loss", ylabel="mean over the cohort")
    over_rounds(axes, max(losses))
    if min(losses.values()) >= 0:
        axes.set_ylim(0, 1.08 * max(float(means.max()), 1e-9))
    return figure


@as_svg
def draw_distribution(rows: Sequence[ClientRow], headline: Headline, reading: str) -> Figure:
    """Draw the empirical distribution of the clients' test results: the share of clients at or below each value."""
    personal, shared = (client_column(predictor, headline.name, reading) for predictor in ("personal", "global"))
    curves = {name: _values([row for row in rows if group_of(row) == name], personal) for name in GROUPS}
    curves = {name: np.sort(curve) for name, curve in (curves | {"global": _values(rows, shared)}).items()}
    figure, axes = panel(3.3)
    all_values = np.concatenate(list(curves.values())).tolist()
    low, right = around(all_values or [0.0])
    if headline.percent:
        low, right = min(all_values, default=0.0) - 0.02, 1.0
    for name, curve in curves.items():
        n = len(curve)
        if n == 0:
            continue
        tenth = math.ceil(n / 10)
        foot = slice(1, tenth + 1) if headline.higher_is_better else slice(n - tenth + 1, n + 1)
        x, y = np.array([low, *curve, right]), np.array([0.0, *(np.arange(n) + 1) / n, 1.0])
        dash, colour = "--" if name == "global" else "-", COLOURS[name]
        axes.step(x, y, dash, where="post", color=colour, label=f"{GROUP_TITLES[name]} ({n})")
        axes.step(x[foot], y[foot], where="post", color=colour, linewidth=3.6, alpha=0.75)
        end = -1 if headline.higher_is_better else 0
        axes.plot([x[foot][end]], [y[foot][end]], "o", color=colour, markersize=3.6)
    axes.set(title="Distribution over clients", xlabel=f"test {headline.title}", ylabel="share of clients at or below")
    axes.set(xlim=(max(0.0, low), 1.005) if headline.percent else (low, right), ylim=(0, 1.01))
    axes.grid(visible=True, axis="x")
    percent(*([axes.xaxis] if headline.percent else []), axes.yaxis)
    axes.legend(loc="best")
    return figure


@as_svg
def draw_gains(rows: Sequence[ClientRow], headline: Headline, reading: str) -> Figure:
    """Draw each client's test result with the personalized model against that with the global one, as a point."""
    columns = [client_column(predictor, headline.name, reading) for predictor in ("global", "personal")]
    both = _measured(_measured(rows, columns[1]), columns[0])
    figure, axes = panel(3.3)
    x, y = (_values(both, column) for column in columns)
    low, high = around([*x, *y] or [0.0])
    if headline.percent:
        low, high = max(0.0, min([*x, *y], default=0.0) - 0.03), 1.015
    seen = np.array([row["seen"] == "true" for row in both], dtype=bool)
    diagonal = [0.0, 1.0] if headline.percent else [low, high]
    axes.plot(diagonal, diagonal, color=INK, linewidth=0.7, alpha=0.5)
    dots(axes, x, y, seen)
    for kind, marker in ((seen, "o"), (~seen, "D")):
        worst = np.flatnonzero(kind)[np.argsort(headline.sign * y[kind], kind="stable")[: math.ceil(kind.sum() / 10)]]
        axes.scatter(
            x[worst], y[worst], s=26, marker=marker, facecolors="none", edgecolors=INK, linewidths=0.8,
            rasterized=len(both) > MANY_POINTS,
        )  # fmt: skip
    above, below = ("personalized", "global") if headline.higher_is_better else ("global", "personalized")
    axes.text(0.02, 0.98, f"{above} better: {(y > x).sum()}", transform=axes.transAxes, va="top")
    axes.text(0.98, 0.02, f"{below} better: {(y < x).sum()}", transform=axes.transAxes, ha="right")
    handles, labels = axes.get_legend_handles_labels()
    circle = Line2D([], [], linestyle="", marker="o", markersize=5, color="none", markeredgecolor=INK)
    legend = axes.legend([*handles, circle], [*labels, "worst decile"], loc="lower right", bbox_to_anchor=(1, 0.06))
    if not headline.higher_is_better:  # the points are below the diagonal
        legend.set(loc="upper left")
        legend.set_bbox_to_anchor((0, 0.94), axes.transAxes)
    axes.set(title="Gain by personalization", xlabel=f"{headline.title} of the global model")
    axes.set_ylabel(f"{headline.title} of the personalized model")
    axes.set(xlim=(low, high), ylim=(low, high))
    if headline.percent:
        percent(axes.xaxis, axes.yaxis)
    return figure


def _measured(rows: Sequence[ClientRow], column: str) -> list[ClientRow]:
    """Return the clients that have a value in a column."""
    return [row for row in rows if row.get(column)]


def _values(rows: Sequence[ClientRow], column: str) -> Array:
    return np.array([float(row[column]) for row in _measured(rows, column)], dtype=np.float64)
