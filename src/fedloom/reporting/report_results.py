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
from fedloom.reporting.page import DASH, FEWEST_POINTS, Panel, Part
from fedloom.reporting.report_setup import summary_of
from fedloom.reporting.tables import Table, TableRow, one_block, table_row
from fedloom.reporting.words import GROUP_TITLES, client_column, is_masked
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import (
    ACCURACY,
    MODEL_LOSS,
    Headline,
    MetricValues,
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
    last, best, headline = lines[-1], _best(run), headline_of(lines[-1])
    masked = any(is_masked(last[key]) for key in GROUP_TITLES if last[key] is not None)
    main, other = ("masked", "unmasked") if masked else ("unmasked", "masked")
    is_best = best is not None and best["round"] == last["round"]
    which = f"Round {last['round']} ({'last and best by validation' if is_best else 'last'})"
    under = f", {main}" if headline == ACCURACY else ""
    blocks = [(f"{which}{under}", _rows(last, headline))]
    otherwise = _other_reading(last, other)
    if any(group is not None for group in otherwise.values()):
        blocks.append((f"{which}, {other}", _rows(otherwise, headline)))
    if best is not None and not is_best:
        blocks.append((f"Round {best['round']} (best by validation){under}", _rows(best, headline)))
    headings = (f"test {headline.heading}", "clients", "mean ± std", "worst", "worst decile", "pooled", "loss")
    tables = (Table(headings, tuple(blocks)), *_all_metrics(last, headline))
    about = (_about_results(headline), *_about_macro(last), *_last_evaluations(run, headline), *_spread(last))
    return Part(tables=tables, text=" ".join(about))


def _spread(line: Mapping[str, Any]) -> list[str]:
    """Return a sentence on the spread of the clients' models, if it was measured."""
    found = {key: group["relative"] for key, group in line.get("spread", {}).items() if group is not None}
    shown = [f"{GROUP_TITLES[key]} {100 * value:.2g} %" for key, value in found.items() if value is not None]
    if not shown:
        return []
    return [
        f"Distance of the clients' models from their mean (root mean square, relative to the norm of the mean): "
        f"{', '.join(shown)}; 0 if all clients have the same model."
    ]


def _about_results(headline: Headline) -> str:
    pooled = "Pooled: over all clients' examples together. Loss: mean over clients, as in training."
    if headline == ACCURACY:
        pooled = (
            "Pooled: correct predictions over examples. Masked: only the labels of the client's own training data can "
            "be predicted. Loss: mean over clients, in nats."
        )
    validated = f"pooled validation {headline.title}"
    return (
        "Each client counts once in mean, std (population) and worst. Worst decile: mean of the worst tenth of clients "
        f"(rounded up). {pooled} The best round has the {headline.superlative} {validated} of seen clients, the "
        "earliest on ties; test data are not used to choose it."
    )


def _about_macro(line: Mapping[str, Any]) -> list[str]:
    """Return a sentence on macro F1, if it is in the table."""
    if not any("macro_f1" in metrics_of(line[key]) for key in GROUP_TITLES if line[key] is not None):
        return []
    return [
        "Macro F1 of a client: mean over the classes (or labels) that it has or that are predicted for it. One wrong "
        "prediction of a class that it does not have counts as a class of F1 0, so where clients have few of the "
        "classes, the mean of macro F1 is far below that of accuracy; the pooled one is not."
    ]


def _all_metrics(line: Mapping[str, Any], headline: Headline) -> tuple[Table, ...]:
    """Return a table of every metric of the task; none if the headline metric is the only one."""
    found = {key: metrics_of(line[key]) for key in GROUP_TITLES if line[key] is not None}
    names = [
        name
        for name in dict.fromkeys(name for metrics in found.values() for name in metrics)
        if name != MODEL_LOSS.name
    ]
    if not set(names) - {headline.name}:
        return ()
    rows = []
    for name in names:
        cells = []
        for metrics in found.values():
            values = metrics.get(name, MetricValues())
            cells += [_shown(name, value) for value in (values.mean, values.worst_decile, values.pooled)]
        rows.append(table_row(metric_heading(name), *cells))
    headings = ("test metric", *(("mean", "worst decile", "pooled") * len(found)))
    above = (("", 1), *((GROUP_TITLES[key], 3) for key in found))
    return (Table(headings, ((f"Round {line['round']}, every metric", tuple(rows)),), above=above),)


def _shown(name: str, value: float | None) -> str:
    return DASH if value is None else shown_metric(name, value)


def _last_evaluations(run: RunFolder, headline: Headline) -> list[str]:
    """Return a sentence on the last evaluations together, if the run is finished and has several."""
    found = summary_of(run).get("last_evaluations")
    if found is None or found["evaluations"] < 2:  # a run of an older version, or one in progress
        return []
    means = []
    for key, label in GROUP_TITLES.items():
        over = (found[key] or {}).get(f"{headline.name}_mean")
        if over is not None:
            mean, *ends = (headline.shown(over[name]) for name in ("mean", "lowest", "highest"))
            means.append(f"{label} {mean} ({' to '.join(ends)})")
    if not means:
        return []
    first, last = found["rounds"]
    return [
        f"Mean of the last {found['evaluations']} evaluations, rounds {first} to {last} (lowest to highest)"
        f"{', in percent' if headline.percent else ''}: {'; '.join(means)}. Reporting the {headline.superlative} of "
        "several evaluations would amount to choosing by test data."
    ]


def _best(run: RunFolder) -> Mapping[str, Any] | None:
    """Return the best round; for a finished run it is in the summary, so that torch is not needed."""
    if summary := summary_of(run):
        chosen: Mapping[str, Any] | None = summary["best"]
        return chosen
    from fedloom.evaluation.summary import best

    return best(run.evaluations())


def _other_reading(groups: Mapping[str, Any], other: str) -> dict[str, Any]:
    found: dict[str, Any] = {key: None if groups[key] is None else groups[key].get(other) for key in GROUP_TITLES}
    if found["global"] is not None:
        inner = _other_reading({**groups["global"], "global": None}, other)
        found["global"] = {**found["global"], "seen": inner["seen"], "unseen": inner["unseen"]}
    return found


def _rows(groups: Mapping[str, Any], headline: Headline) -> tuple[TableRow, ...]:
    rows = [
        table_row(f"{key} clients, personalized model", *_cells(groups[key], headline), colour=key)
        for key in ("seen", "unseen")
    ]
    overall = groups["global"]
    if overall is not None:
        rows.append(table_row("all clients, global model", *_cells(overall, headline), colour="global"))
        inner = (key for key in ("seen", "unseen") if overall[key] is not None)
        rows += [table_row(f"{key} clients", *_cells(overall[key], headline)) for key in inner]
    return tuple(rows)


def _cells(group: Mapping[str, Any] | None, headline: Headline) -> tuple[str, ...]:
    if group is None:
        return (DASH,) * 6
    mean, std, *others = (DASH if value is None else headline.shown(value) for value in values_of(group, headline))
    loss = f"{group['loss_mean']:.3f}" if headline == ACCURACY else significant(group["loss_mean"])
    return (str(group["clients"]), mean if std == DASH else f"{mean} ± {std}", *others, loss)


def last_line(run: RunFolder) -> Mapping[str, Any]:
    """Return the last evaluation; empty without one."""
    line, _ = run.last_evaluation() or ({}, 0)
    return line


def main_reading(run: RunFolder) -> str:
    """Return the primary reading, ``masked`` or ``unmasked``."""
    groups = (last_line(run).get(key) for key in ("seen", "unseen"))
    return "masked" if any(is_masked(group) for group in groups if group is not None) else "unmasked"


def client_results(run: RunFolder) -> Part:
    """Return the distribution of results over clients, and the clients with the lowest ones."""
    rows, reading, headline = run.clients(), main_reading(run), headline_of(last_line(run))
    if not any(row[client_column("personal", headline.name, reading)] for row in rows):
        return Part(text="No client's own results are known: metrics were summed securely, or no client was measured.")
    panels = [Panel("clients", draw_distribution(rows, headline, reading))]
    right, thick = ("right", "foot") if headline.higher_is_better else ("left", "top")
    which, value = ("last evaluation", "a value")
    if headline == ACCURACY:
        which, value = f"{reading}, {which}", "an accuracy"
    text = (
        f"Each client's test {headline.title} ({which}). Distribution: the share of clients at or below {value}, so "
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


def _worst(rows: Sequence[Mapping[str, str]], headline: Headline, reading: str, names: Mapping[str, str]) -> Table:
    """Return a table of every metric of the clients with the worst results, or of all clients if they are few."""
    column = client_column("personal", headline.name, reading)
    measured = [row for row in rows if row[column]]
    measured.sort(key=lambda row: (headline.sign * float(row[column]), row["id"]))
    few = len(measured) <= FEW_CLIENTS
    metrics = [headline.name] if headline == ACCURACY else _client_metrics(measured, headline, reading)
    shown = []
    for row in measured if few else measured[: min(NAMED, math.ceil(len(measured) / 10))]:
        values = (row[client_column("personal", name, reading)] for name in metrics)
        cells = [_shown(name, float(text) if text else None) for name, text in zip(metrics, values, strict=True)]
        classes = [_classes(row["labels"].split(), names)] if names else []
        shown.append(client_row(row, *cells, row["train"], *classes))
    which = f"{headline.inferior} {headline.title}"
    title = f"Clients, {which} first" if few else f"Clients of {which}"
    headings = ("client", *map(metric_heading, metrics), "training examples", *(["classes"] if names else []))
    return small_table(title, headings, shown, wide=len(metrics) > MANY_METRICS)


def _client_metrics(rows: Sequence[Mapping[str, str]], headline: Headline, reading: str) -> list[str]:
    """Return the metrics that some client has, the headline metric first; the loss only if it is that metric."""
    before, after = client_column("personal", "|", reading).split("|")
    known = dict.fromkeys(key for row in rows for key, text in row.items() if text)
    found = [
        key.removeprefix(before).removesuffix(after) for key in known if key.startswith(before) and key.endswith(after)
    ]
    return list(dict.fromkeys([headline.name, *(name for name in found if name != MODEL_LOSS.name)]))


def _changed(rows: Sequence[Mapping[str, str]], headline: Headline, reading: str) -> Table:
    """Return a table of the clients with the largest losses and gains from personalization."""
    columns = [client_column(predictor, headline.name, reading) for predictor in ("global", "personal")]
    measured = [row for row in rows if all(row[column] for column in columns)]
    both = [(row, float(row[columns[0]]), float(row[columns[1]])) for row in measured]
    both.sort(key=lambda each: (headline.sign * (each[2] - each[1]), each[0]["id"]))
    half = min(NAMED // 2, len(both) // 2)
    shown = []
    for row, before, after in both[:half] + both[len(both) - half :]:
        gain = headline.sign * (after - before)
        points = f"{100 * gain:+.1f}" if headline.percent else f"{gain:+.3g}"
        shown.append(client_row(row, headline.shown(before), headline.shown(after), points))
    headings = ("client", "global, %", "personalized, %", "gain, points")
    if not headline.percent:
        gain_of = "gain" if headline.higher_is_better else f"{headline.title} saved"
        headings = ("client", "global", "personalized", gain_of)
    return small_table("Smallest and largest gains by personalization", headings, shown)


def client_row(row: Mapping[str, str], *cells: str) -> TableRow:
    """Return a client's row: its id, cells, the colour of its group and its owner."""
    return table_row(row["id"], *cells, colour=group_of(row), note=owner_of(row))


def group_of(row: Mapping[str, str]) -> str:
    """Return the group of a client, by its line of ``clients.csv``."""
    return "seen" if row["seen"] == "true" else "unseen"


def owner_of(row: Mapping[str, str]) -> str:
    """Return the name of a client's owner; empty if it is the client's id."""
    owner = row.get("owner", "")
    return owner if owner != row["id"] else ""


def _classes(labels: Sequence[str], names: Mapping[str, str]) -> str:
    """Return the names of a client's classes if there are at most two, else their number."""
    return ", ".join(names.get(label, label) for label in labels) if len(labels) <= 2 else str(len(labels))


def _class_names(run: RunFolder) -> dict[str, str]:
    """Return class names by number; empty if the partition cannot be read."""
    try:
        manifest = run.manifest()
        return {str(k): name for k, name in enumerate(manifest.spec.class_names[: manifest.spec.classes])}
    except DataError:
        return {}


@as_svg
def draw_learning_curve(lines: Sequence[Mapping[str, Any]], headline: Headline) -> Figure:
    """Draw the mean of the headline metric on test data over rounds, with a band of ± one standard deviation.

    Axes of fractions begin at zero; others show the trained rounds, and an untrained model may lie outside.
    """
    figure, axes = panel(2.6)
    drawn = [_draw_group(axes, lines, name, headline) for name in COLOURS]
    over_rounds(axes, lines[-1]["round"])
    axes.set(title=f"Test {headline.title}", ylabel="mean over clients")
    if headline.percent:
        top = max((top for _, top in drawn), default=0.0)
        axes.set_ylim(0, min(1.0, math.ceil(10 * top + 0.5) / 10))
        percent(axes.yaxis)
    elif len(trained := [value for values, _ in drawn for value in values]) > 1:
        axes.set_ylim(*around(trained))
    axes.legend(loc="lower right" if headline.percent else "best")
    return figure


def _draw_group(
    axes: Axes, lines: Sequence[Mapping[str, Any]], name: str, headline: Headline
) -> tuple[list[float], float]:
    """Draw a group's learning curve; return its means of trained rounds, and the upper end of its band."""
    groups = [(line["round"], values_of(line[name], headline)) for line in lines if line[name] is not None]
    measured = [(number, values) for number, values in groups if values.mean is not None]
    if not measured:
        return [], 0.0
    x, mean = [number for number, _ in measured], np.array([values.mean for _, values in measured])
    top, colour = 0.0, COLOURS[name]
    if all(values.std is not None for _, values in measured):
        std = np.array([values.std for _, values in measured])
        limits = (0.0, 1.0) if headline.percent else (-math.inf, math.inf)
        _, high = band(axes, x, mean, std, colour, limits)
        top = float(high.max())
    dash, marker = "--" if name == "global" else "-", "o" if len(measured) <= 25 else None
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


_EVERYONE = ("true", "false")


@as_svg
def draw_distribution(rows: Sequence[Mapping[str, str]], headline: Headline, reading: str) -> Figure:
    """Draw the empirical distribution of the clients' test results: the share of clients at or below each value."""
    groups = (("seen", "personal", ("true",)), ("unseen", "personal", ("false",)), ("global", "global", _EVERYONE))
    columns = {name: (client_column(predictor, headline.name, reading), of) for name, predictor, of in groups}
    curves = {name: np.sort(_values(_measured(rows, column, of), column)) for name, (column, of) in columns.items()}
    figure, axes = panel(3.3)
    found = [float(value) for curve in curves.values() for value in curve]
    left, right = around(found or [0.0])
    if headline.percent:
        left, right = min(found, default=0.0) - 0.02, 1.0
    for name, curve in curves.items():
        n = len(curve)
        if n == 0:
            continue
        tenth = math.ceil(n / 10)
        foot = slice(1, tenth + 1) if headline.higher_is_better else slice(n - tenth + 1, n + 1)
        x, y = np.array([left, *curve, right]), np.array([0.0, *(np.arange(n) + 1) / n, 1.0])
        dash, colour = "--" if name == "global" else "-", COLOURS[name]
        axes.step(x, y, dash, where="post", color=colour, label=f"{GROUP_TITLES[name]} ({n})")
        axes.step(x[foot], y[foot], where="post", color=colour, linewidth=3.6, alpha=0.75)
        end = -1 if headline.higher_is_better else 0
        axes.plot([x[foot][end]], [y[foot][end]], "o", color=colour, markersize=3.6)
    axes.set(title="Distribution over clients", xlabel=f"test {headline.title}", ylabel="share of clients at or below")
    axes.set(xlim=(max(0.0, left), 1.005) if headline.percent else (left, right), ylim=(0, 1.01))
    axes.grid(visible=True, axis="x")
    percent(*([axes.xaxis] if headline.percent else []), axes.yaxis)
    axes.legend(loc="best")
    return figure


@as_svg
def draw_gains(rows: Sequence[Mapping[str, str]], headline: Headline, reading: str) -> Figure:
    """Draw each client's test result with the personalized model against that with the global one, as a point."""
    columns = [client_column(predictor, headline.name, reading) for predictor in ("global", "personal")]
    both = _measured(_measured(rows, columns[1]), columns[0])
    figure, axes = panel(3.3)
    x, y = (_values(both, column) for column in columns)
    sign = headline.sign
    low, high = around([*x, *y] or [0.0])
    if headline.percent:
        low, high = max(0.0, min((float(v.min()) for v in (x, y) if len(v)), default=0.0) - 0.03), 1.015
    seen = np.array([row["seen"] == "true" for row in both], dtype=bool)
    diagonal = [0.0, 1.0] if headline.percent else [low, high]
    axes.plot(diagonal, diagonal, color=INK, linewidth=0.7, alpha=0.5)
    dots(axes, x, y, seen)
    for kind, marker in ((seen, "o"), (~seen, "D")):
        worst = np.flatnonzero(kind)[np.argsort(sign * y[kind], kind="stable")[: math.ceil(kind.sum() / 10)]]
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


def _measured(rows: Sequence[Mapping[str, str]], column: str, of: Sequence[str] = _EVERYONE) -> list[Mapping[str, str]]:
    """Return the clients that have a value in a column and whose ``seen`` is in ``of``."""
    return [row for row in rows if row.get(column) and row["seen"] in of]


def _values(rows: Sequence[Mapping[str, str]], column: str) -> Array:
    return np.array([float(row[column]) for row in rows], dtype=np.float64)
