"""Sections of a report on classification: confusion, and clients one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedloom.core.words import pluralize
from fedloom.errors import DataError
from fedloom.reporting.drawing import (
    FULL,
    HALF,
    INK,
    PAPER,
    as_svg,
    class_label,
    class_ticks,
    heat,
    heat_bar,
    shares,
    sheet,
)
from fedloom.reporting.page import DASH, ConfusionCard, Panel, Part
from fedloom.reporting.report_results import NAMED, group_of, main_reading, owner_of, small_table
from fedloom.reporting.tables import Cell, Table, TableRow, one_block, table_row
from fedloom.reporting.words import GROUP_TITLES, in_percent
from fedloom.runs.folder import RunFolder

CARDS = 1000
"""Maximum number of clients for which each gets a card; every card adds half a kilobyte to the page."""


CARD_CLASSES = 12
"""Maximum number of classes in a card's confusion matrix: the most frequent ones."""


def each_client(run: RunFolder) -> Part:
    """Return a card for each client with its data and its own model's confusion matrix."""
    rows, confusions, reading = run.clients(), run.confusions(), main_reading(run)
    manifest = run.manifest()
    names = [class_label(name) for name in manifest.spec.class_names]
    counts = {client.id: client.class_counts["train"] for client in manifest.clients}
    if len(rows) > CARDS:
        return Part(text=f"Runs of more than {CARDS:,} clients have their confusion matrices in confusion.csv only.")
    cards = []
    for k, row in enumerate(rows):
        accuracy = row.get(f"personal_accuracy_{reading}")
        facts = [f"accuracy {in_percent(float(accuracy))} %"] if accuracy else ["not measured"]
        facts += [pluralize(int(row["train"]), "training example"), class_mix(counts.get(row["id"], ()), names)]
        about = "; ".join(filter(None, facts))
        table = confusion_table_of(confusions.get(row["id"], []), names)
        cards.append(ConfusionCard(row["id"], f"c{k}", group_of(row), owner_of(row), about, table))
    text = (
        f"Accuracy: {reading}. Matrix: test split, unmasked, personalized model, in examples, with a row for each true "
        f"class and a column for each predicted one; the {CARD_CLASSES} most frequent classes."
    )
    return Part(cards=tuple(cards), text=text)


def confusion_table_of(pairs: Sequence[tuple[int, int, int]], names: Sequence[str]) -> Table | None:
    """Return a client's confusion matrix of the classes that occur in it; None without examples.

    Parameters
    ----------
    pairs
        True class, predicted class and number of examples.
    names
        Names of all classes.
    """
    often: Counter[int] = Counter()
    for true, predicted, n in pairs:
        often.update({true: n})
        often.update({predicted: n})
    kept = sorted(sorted(often, key=lambda k: (-often[k], k))[:CARD_CLASSES])
    examples = {(true, predicted): n for true, predicted, n in pairs}
    rows = []
    for true in kept:
        total = sum(n for (row, _), n in examples.items() if row == true)
        if total:
            found = (examples.get((true, predicted), 0) for predicted in kept)
            cells = (Cell(str(n or ""), shade=round(100 * n / total)) for n in found)
            rows.append(TableRow((Cell(names[true]), *cells)))
    headings = ("true \\ predicted", *(names[k] for k in kept))
    return one_block(headings, rows, small=True) if rows else None


def class_mix(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return the classes of a client's training data in percent, most frequent first; empty if unknown."""
    most = sorted((k for k, n in enumerate(counts) if n), key=lambda k: (-counts[k], k))
    parts = [f"{names[k]} ({100 * counts[k] / sum(counts):.0f} %)" for k in most[:NAMED]]
    return ", ".join([*parts, *([f"{len(most) - NAMED} more"] if len(most) > NAMED else [])])


def confusion_matrices(run: RunFolder) -> Part:
    """Return the confusion matrices of the seen and unseen clients' models and of the global model."""
    document = run.json("confusion.json")
    names, counts = document["classes"], _confusion_counts(document)
    if not counts:
        raise DataError(f"{run.path / 'confusion.json'}: no client answered in round {document['round']}")
    titles = {key: f"{key.capitalize()} clients, personalized model" for key in ("seen", "unseen")}
    titles["global"] = "All clients, global model"
    wide = confusion_is_wide(names)
    panels = tuple(
        Panel(f"confusion-{key}", draw_confusion(each, names, titles[key]), wide) for key, each in counts.items()
    )
    text = (
        f"Test split, unmasked, round {document['round']}. Each row is a class and sums to 100 %. The colour is the "
        "square root of the share, so that rare errors can be seen."
    )
    labels = [class_label(name) for name in names]
    table = _errors(counts, labels, wide=wide or len(panels) % 2 == 0)
    return Part(panels=panels, tables=(table,), columns=2, text=text)


def _confusion_counts(document: Mapping[str, Any]) -> dict[str, Sequence[Sequence[int]]]:
    """Return the counts ``[C, C]`` of the groups that have any: the personal models' by group, the global one's."""
    counts = {key: document["personal"][key] for key in ("seen", "unseen")}
    of_global = [each for each in (document["global"] or {}).values() if each is not None]
    if of_global:
        counts["global"] = [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*of_global, strict=True)]
    return {key: found for key, found in counts.items() if found is not None}


def _errors(counts: Mapping[str, Sequence[Sequence[int]]], names: Sequence[str], *, wide: bool) -> Table:
    """Return a table of the first group's most frequent errors, with rates in all groups in percent of the class."""
    first = next(iter(counts.values()))
    wrong = [(n, i, j) for i, row in enumerate(first) for j, n in enumerate(row) if i != j and n]
    most = sorted(wrong, key=lambda each: (-each[0], each[1], each[2]))[: 6 if wide else NAMED]
    rows = []
    for _, i, j in most:
        parts = [(each[i][j], sum(each[i])) for each in counts.values()]
        rows.append(table_row(f"{names[i]} → {names[j]}", *(in_percent(n / of) if of else DASH for n, of in parts)))
    title = f"Most frequent errors, {GROUP_TITLES[next(iter(counts))]}"
    return small_table(title, ("true → predicted, %", *counts), rows, wide=wide)


@as_svg
def draw_confusion(counts: Sequence[Sequence[int]], class_names: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix: a row per true class, in percent of its examples."""
    share, names = shares(counts), [class_label(name) for name in class_names]
    c, longest, width = len(names), max(map(len, names)), FULL if confusion_is_wide(class_names) else HALF
    figure = sheet(width, width, layout="compressed")
    axes = figure.add_subplot()
    image = heat(axes, share, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        class_ticks(axis, names, 72 * 0.8 * width / c)
    if longest > 2:
        slanted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if c <= 12 else {"rotation": 90}
        for label in axes.get_xticklabels():
            label.set(**slanted)
    axes.set(title=title, xlabel="predicted class", ylabel="true class")
    if c > 12:
        heat_bar(figure, image, axes, "share of the true class")
        return figure
    for i, row in enumerate(share):
        for j, value in enumerate(row):
            if value >= 0.005:
                colour = PAPER if value > 0.5 else INK
                axes.text(j, i, f"{100 * value:.0f}", color=colour, ha="center", va="center", fontsize=7.5)
    return figure


def confusion_is_wide(class_names: Sequence[str]) -> bool:
    """Return whether the matrix needs the full page width: many classes with long names."""
    return len(class_names) > 30 and max(len(class_label(name)) for name in class_names) > 2
