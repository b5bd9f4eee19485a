"""Sections of a report on data, time, method, settings and environment."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.core.words import dotted_keys, pluralize
from fedloom.data.manifest import Manifest
from fedloom.errors import DataError
from fedloom.reporting.drawing import (
    COLOURS,
    FULL,
    OTHER,
    Array,
    as_svg,
    class_label,
    class_ticks,
    heat,
    heat_bar,
    panel,
    shares,
    sheet,
)
from fedloom.reporting.page import Panel, Part, one_block, table_row
from fedloom.reporting.run_results import GROUPS
from fedloom.reporting.words import Document, human_time, number_range, shown_epsilon
from fedloom.runs.files import JOURNAL, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import BURNT, DONE, EVALUATED, SPENT

MANY_CLIENTS = 300
"""Maximum number of columns in the partition figure; above it, neighbouring clients share a column."""


def summary_of(run: RunFolder) -> Document:
    """Return the summary of a finished run; empty otherwise, which the top of the page explains."""
    try:
        return run.json_or_none(SUMMARY) or {}
    except DataError:
        return {}


def time(run: RunFolder) -> Part:
    """Return the time spent in the phases of the rounds, and outside them."""
    summary = summary_of(run)
    if summary.get("rounds") == 0:
        return Part(text="No round was trained.")
    rounds: dict[int, Mapping[str, float]] = {}  # a repeated round counts once
    failed = paused_s = 0.0
    for line in run.objects(JOURNAL):
        paused_s += line.get("paused", {}).get("seconds", 0.0)
        if (outcome := line.get("outcome", DONE)) == DONE:
            rounds[line["round"]] = line.get("phases", {})
        elif outcome not in (BURNT, EVALUATED, SPENT):  # these follow a round, whose phases stay
            failed += line["seconds"]
            rounds.pop(line["round"], None)
    if not any(rounds.values()):
        raise DataError(f"{run.path / JOURNAL}: has no round with phase times")
    inside: dict[str, float] = {}
    for _, phases in sorted(rounds.items()):
        inside |= {name: inside.get(name, 0.0) + seconds for name, seconds in phases.items()}
    rest = summary.get("duration_s", 0.0) - failed - paused_s - sum(inside.values())
    others = {"failed attempts": failed, "paused": paused_s, "evaluation and rest": rest}
    text = (
        f"Time of the aggregator in {pluralize(len(rounds), 'round')}. A phase that is named after a message lasts "
        "from sending it to the last reply."
    )
    total = Panel("time", draw_time(inside, {name: s for name, s in others.items() if s > 0}))
    return Part(panels=(total,), columns=2, text=text)


def method(run: RunFolder) -> Part:
    """Return the method's own entries of the summary; without any if it cannot be read."""
    summary = summary_of(run)
    pairs = _pairs(summary.get(summary.get("algorithm", ""), {}))
    return Part(text="Entries of the method itself in summary.json.", pairs=pairs)


def privacy(run: RunFolder) -> Part:
    """Return the claim of the training's differential privacy in sentences, its numbers, and ε by round."""
    claim = summary_of(run)["training_privacy"]
    spent = [(line["round"], line["privacy"]) for line in run.metrics() if line.get("privacy") is not None]
    thinned = spent[:: -max(1, math.ceil(len(spent) / 12))][::-1]  # at most a dozen, the last included
    rows = [table_row(str(round), shown_epsilon(now["epsilon"]), f"{now['sums']:,}") for round, now in thinned]
    table = one_block(("round", "ε", "noisy sums"), rows, "ε by round", small=True)
    return Part(
        tables=(table,) if rows else (),
        text=" ".join(claim["statement"]),
        pairs=(
            ("unit", claim["unit"]),
            ("neighbouring data", claim["neighbouring"]),
            ("ε toward readers of the models", shown_epsilon(claim["to_readers"]["epsilon"])),
            ("ε toward members", shown_epsilon(claim["to_members"]["epsilon"])),
            ("ε toward the aggregator", shown_epsilon(claim["to_aggregator"]["epsilon"])),
            ("δ", f"{claim['delta']:g}"),
            ("mechanism", f"{claim['mechanism']} noise, sampling {', '.join(claim['sampling']) or 'none'}"),
            ("clipping norm, noise multiplier", f"{claim['clip']:g}, {claim['noise_multiplier']:.4g}"),
            ("source of noise", claim["noise"]),
            ("covers", ", ".join(claim["covers"])),
        ),
    )


def settings(run: RunFolder) -> Part:
    """Return the experiment file."""
    return Part(pre=run.text("experiment.yaml").strip())


def machine(run: RunFolder) -> Part:
    """Return versions and hardware."""
    pairs = _pairs(run.json("environment.json"))
    if not pairs:
        raise DataError(f"{run.path / 'environment.json'}: is empty")
    return Part(pairs=pairs)


def data(run: RunFolder) -> Part:
    """Return the partition: its scheme, and the classes of every client, if the data have classes."""
    manifest = run.manifest()
    pairs = _about_partition(manifest)
    if not manifest.spec.classes:
        return Part(pairs=pairs)
    train = [client.class_counts["train"] for client in manifest.clients]
    if not any(map(sum, train)):
        return Part(text="The training examples have no labels.", pairs=pairs)
    mixes = {
        name: [client.class_counts["train"] for client in manifest.clients if client.seen == (name == "seen")]
        for name in GROUPS
    }
    text = (
        "Training data: a column per client, ordered by most frequent class. The colour is the square root of the "
        "class's share."
    )
    if len(set(map(sum, train))) > 1:
        text += " The curve above is its number of examples."
    together = math.ceil(len(train) / MANY_CLIENTS)
    if together > 1:
        text += f" Each column is the mean of {together} neighbours."
    panel = Panel("partition", draw_partition(mixes, manifest.spec.class_names), wide=True)
    return Part(panels=(panel,), text=text, pairs=pairs)


def _about_partition(manifest: Manifest) -> tuple[tuple[str, str], ...]:
    scheme = {key: value for key, value in manifest.scheme.items() if value is not None}
    items = sorted(scheme.items(), key=lambda item: (item[0] != "scheme", item[0]))
    classes_of = [sum(1 for count in client.class_counts["train"] if count) for client in manifest.clients]
    sizes = {split: sum(c.size(split) for c in manifest.clients) for split in ("train", "validation", "test")}
    inputs_of = "×".join(map(str, manifest.spec.input_shape))
    outputs = f", {pluralize(manifest.spec.classes, 'class', 'classes')}" if manifest.spec.classes else ""
    if (targets := manifest.spec.targets) is not None:
        outputs = f", {targets.task}, {pluralize(targets.outputs, 'output')}"
    return (
        ("data set", f"{manifest.dataset}{outputs}, inputs {inputs_of}"),
        ("clients", f"{len(manifest.roster)} seen, {len(manifest.unseen)} unseen"),
        ("scheme", ", ".join(f"{key} {_value(value)}" for key, value in items)),
        ("training examples per client", number_range([client.train for client in manifest.clients])),
        *([("classes per client", number_range(classes_of))] if manifest.spec.classes else []),
        ("examples", ", ".join(f"{size:,} {split}" for split, size in sizes.items())),
        ("fingerprint", manifest.fingerprint),
    )


def _pairs(value: Document) -> tuple[tuple[str, str], ...]:
    return tuple((key, _value(item)) for key, item in dotted_keys(value).items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@as_svg
def draw_partition(mixes: Mapping[str, Sequence[Sequence[int]]], class_names: Sequence[str]) -> Figure:
    """Draw the partition: a column per client with its class proportions, and its number of training examples above.

    Clients are ordered by their most frequent class and its share. Beyond :data:`MANY_CLIENTS`, neighbouring clients
    share a column, which shows their means.
    """
    groups = {name: np.asarray(rows, dtype=np.float64) for name, rows in mixes.items() if len(rows)}
    together = math.ceil(sum(map(len, groups.values())) / MANY_CLIENTS)
    columns = {name: _columns(rows, together) for name, rows in groups.items()}
    sizes = np.concatenate([rows.sum(1) for rows in groups.values()])
    unequal, c = bool((sizes != sizes[0]).any()), len(class_names)
    height, above = min(max(0.165 * c, 0.8), 4.6), 0.6
    figure = sheet(FULL, height + above * unequal + 0.55)
    axes = figure.subplots(
        1 + unequal,
        len(columns),
        squeeze=False,
        width_ratios=[max(len(sizes), 3) for sizes, _ in columns.values()],
        height_ratios=[above, height] if unequal else None,
    )
    for axis, (_, mix) in zip(axes[-1], columns.values(), strict=True):
        image = heat(axis, mix.T)
        axis.set(xticks=[], yticks=[], xlabel="clients")
    class_ticks(axes[-1, 0].yaxis, [class_label(name) for name in class_names], 72 * height / c)
    if unequal:
        _draw_sizes(axes[0], {name: sizes for name, (sizes, _) in columns.items()})
    for axis, (name, rows) in zip(axes[0], groups.items(), strict=True):
        axis.set_title(f"{len(rows)} {name}")
    heat_bar(figure, image, list(axes[-1]), "share of the client's examples")
    return figure


def _draw_sizes(axes: Sequence[Axes], sizes: Mapping[str, Array]) -> None:
    """Draw the numbers of examples of each group's columns on one scale."""
    most = 1.05 * max(float(each.max()) for each in sizes.values())
    for k, (top, (name, each)) in enumerate(zip(axes, sizes.items(), strict=True)):
        edges = np.arange(len(each) + 1) - 0.5
        top.fill_between(edges, [*each, each[-1]], step="post", color=COLOURS[name], alpha=0.6, linewidth=0)
        top.set(xlim=(edges[0], edges[-1]), ylim=(0, most), ylabel="examples" if k == 0 else "")
        top.tick_params(labelbottom=False, bottom=False, labelleft=k == 0, left=k == 0)
        top.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))


def _columns(rows: Array, together: int) -> tuple[Array, Array]:
    """Return sizes and class proportions of clients ``[n, C]``, sorted by main class, ``together`` per column."""
    sizes, mix = rows.sum(1), shares(rows.tolist())
    main = mix.argmax(1)
    order = np.lexsort((np.arange(len(rows)), -mix[np.arange(len(rows)), main], main))
    groups = [order[i : i + together] for i in range(0, len(rows), together)]
    return np.array([sizes[g].mean() for g in groups]), np.array([mix[g].mean(0) for g in groups])


@as_svg
def draw_time(phases: Mapping[str, float], others: Mapping[str, float]) -> Figure:
    """Draw the seconds of each phase, and of what is outside phases in grey."""
    seconds = {**phases, **others}
    total = sum(seconds.values())
    figure, axes = panel(max(2.5, 0.85 + 0.22 * (len(phases) + 2)))
    colours = [COLOURS["seen"] if name in phases else OTHER for name in seconds]
    bars = axes.barh([*seconds], [*seconds.values()], height=0.66, color=colours)
    shares = (f"{human_time(s)} ({s / total:.0%})" if total else human_time(s) for s in seconds.values())
    axes.bar_label(bars, [*shares], padding=3)
    axes.set(title="Total time", xlim=(0, 1.6 * max([*seconds.values(), 1e-9])), xticks=[])
    axes.set_ylim(max(len(seconds), 5) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.tick_params(axis="both", length=0)
    axes.spines["bottom"].set_visible(False)
    return figure
