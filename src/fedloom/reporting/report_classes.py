"""Sections of a report on classification: confusion, and clients one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedloom.core.words import pluralize
from fedloom.errors import DataError
from fedloom.reporting.drawing import (
    COLOURS,
    FULL,
    HALF,
    INK,
    OTHER,
    PAPER,
    as_svg,
    class_label,
    class_ticks,
    dots,
    heat,
    heat_bar,
    percent,
    shares,
    sheet,
)
from fedloom.reporting.page import DASH, Cell, ConfusionCard, Panel, Part, Table, one_block, table_row
from fedloom.reporting.report_results import NAMED, client_row, group_of, last_line, main_reading, owner_of, small_table
from fedloom.reporting.report_setup import summary_of
from fedloom.reporting.words import GROUP_TITLES, Document, in_percent
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
        result = f"accuracy {in_percent(float(accuracy))} %" if accuracy else "not measured"
        examples = pluralize(int(row["train"]), "training example")
        caption = "; ".join(filter(None, (result, examples, class_mix(counts.get(row["id"], ()), names))))
        table = confusion_table_of(confusions.get(row["id"], []), names)
        cards.append(ConfusionCard(row["id"], f"c{k}", group_of(row), owner_of(row), caption, table))
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
    totals: Counter[int] = Counter()
    for true, predicted, n in pairs:
        totals[true] += n
        often[true] += n
        often[predicted] += n
    classes = sorted(sorted(often, key=lambda k: (-often[k], k))[:CARD_CLASSES])
    examples = {(true, predicted): n for true, predicted, n in pairs}
    rows = []
    for true in filter(totals.get, classes):
        counts = (examples.get((true, predicted), 0) for predicted in classes)
        rows.append(table_row(names[true], *(Cell(str(n or ""), shade=round(100 * n / totals[true])) for n in counts)))
    headings = ("true \\ predicted", *(names[k] for k in classes))
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


def _confusion_counts(document: Document) -> dict[str, Sequence[Sequence[int]]]:
    """Return the counts ``[C, C]`` of the groups that have any: the personal models' by group, the global one's."""
    counts = {key: document["personal"][key] for key in ("seen", "unseen")}
    if of_global := [each for each in (document["global"] or {}).values() if each is not None]:
        counts["global"] = np.sum(of_global, axis=0).tolist()
    return {key: each for key, each in counts.items() if each is not None}


def _errors(counts: Mapping[str, Sequence[Sequence[int]]], names: Sequence[str], *, wide: bool) -> Table:
    """Return a table of the first group's most frequent errors, with rates in all groups in percent of the class."""
    key, first = next(iter(counts.items()))
    wrong = sorted((-n, i, j) for i, row in enumerate(first) for j, n in enumerate(row) if i != j and n)
    rows = []
    for _, i, j in wrong[: 6 if wide else NAMED]:
        parts = [(each[i][j], sum(each[i])) for each in counts.values()]
        rows.append(
            table_row(f"{names[i]} → {names[j]}", *(in_percent(n / total) if total else DASH for n, total in parts))
        )
    title = f"Most frequent errors, {GROUP_TITLES[key]}"
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


PICTURED = 5
"""Number of clients shown individually, as in papers/003, Figure 3."""


def _clients_by_id(run: RunFolder) -> dict[str, dict[str, str]]:
    """Return the rows of ``clients.csv`` by id; empty if it cannot be read, as in a run in progress."""
    try:
        return {row["id"]: row for row in run.clients()}
    except DataError:
        return {}


def calibration(run: RunFolder) -> Part:
    """Return the reliability diagram, calibration errors and uncertainties."""
    panel = Panel("reliability", draw_reliability(run.json("calibration.json")))
    of_clients = {
        key: values.get("ece_clients") for key, values in summary_of(run).get("uncertainty", {}).items() if values
    }
    rows = []
    for key, group in last_line(run).get("uncertainty", {}).items():
        if group is not None:
            own = DASH if of_clients.get(key) is None else in_percent(of_clients[key])
            nats = (f"{group[name]:.3f}" for name in ("entropy", "mutual_information"))
            rows.append(table_row(GROUP_TITLES[key], in_percent(group["ece"]), own, *nats, colour=key))
    headings = ("", "calibration error, %", "mean over clients, %", "entropy, nats", "mutual information, nats")
    text = (
        "Test split, unmasked. Predictions are sorted into bins by confidence, the highest predicted probability. The "
        "accuracy of a calibrated model equals its confidence (the diagonal). Calibration error: expected calibration "
        "error (ECE), the mean distance from the diagonal weighted by examples, over all examples together. Its mean "
        "over clients is higher, because an overconfident client does not offset a cautious one, and because of chance "
        "where examples are few. Entropy is that of the prediction. Mutual information of prediction and model is zero "
        "for a client with a single model rather than a distribution of models."
    )
    table = small_table("Calibration error and uncertainty", headings, rows)
    return Part(panels=(panel,), tables=(table,), columns=2, text=text)


def uncertainty(run: RunFolder) -> Part:
    """Return confidence, entropy and mutual information of clients whose models are distributions."""
    document = run.json("uncertainty.json")
    ids, seen, last = document["clients"]["ids"], document["clients"]["seen"], document["rounds"][-1]
    if all(value is None for value in last["entropy"]):
        raise DataError(f"{run.path / 'uncertainty.json'}: no client answered in round {last['round']}")
    panels = (
        Panel("uncertainty-training", draw_confidence_over_training(document), wide=True),
        Panel("uncertainty-clients", draw_accuracy_by_uncertainty(document)),
    )
    by_id = _clients_by_id(run)
    most = sorted((-entropy, i) for i, entropy in enumerate(last["entropy"]) if entropy is not None)[:NAMED]
    rows = []
    for _, i in most:
        right = in_percent(sum(last["right"][i]) / sum(last["examples"][i]))
        nats = (f"{last[name][i]:.3f}" for name in ("entropy", "mutual_information"))
        rows.append(client_row(by_id.get(ids[i], {"id": ids[i], "seen": str(seen[i]).lower()}), right, *nats))
    headings = ("client", "accuracy, %", "entropy, nats", "mutual information, nats")
    text = (
        "Personalized model, test split, unmasked. Bars: share of a client's examples by confidence, with correct "
        "predictions in colour and wrong ones grey, after the first two evaluated rounds and the last. The clients are "
        "those at the minimum, the quartiles and the maximum of entropy after the last round. H and I: mean entropy of "
        "the prediction, and mean mutual information of prediction and model, in nats."
    )
    return Part(
        panels=panels, tables=(small_table("Clients of highest entropy", headings, rows),), columns=2, text=text
    )


@as_svg
def draw_reliability(document: Document) -> Figure:
    """Draw accuracy over confidence by bin, with the share of examples in each bin below.

    A calibrated predictor lies on the diagonal; an overconfident one lies below it.
    """
    figure = sheet(HALF, 4.1)
    upper, lower = figure.subplots(2, 1, height_ratios=[5, 2])
    upper.plot([0, 1], [0, 1], color=INK, alpha=0.35, linewidth=0.8, linestyle=":")
    for name, rows in _groups(document).items():
        examples, confidence, accuracy = np.asarray(rows, dtype=np.float64).T
        has_examples, dash, colour = examples > 0, "--" if name == "global" else "-", COLOURS[name]
        line = {"color": colour, "marker": "o", "markersize": 3, "label": GROUP_TITLES[name]}
        upper.plot(confidence[has_examples], accuracy[has_examples], dash, **line)
        lower.stairs(examples / examples.sum(), document["edges"], color=colour, linestyle=dash, linewidth=1.2)
    upper.set(title="Reliability diagram", xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    lower.set(xlim=(0, 1), xlabel="confidence (highest predicted probability)", ylabel="share of examples")
    lower.set_ylim(bottom=0)
    percent(upper.xaxis, upper.yaxis, lower.xaxis)
    percent(lower.yaxis, bins=3)
    if upper.get_legend_handles_labels()[0]:
        upper.legend(loc="upper left")
    return figure


@as_svg
def draw_confidence_over_training(document: Document) -> Figure:
    """Draw the confidence of some clients' models before, early in and after training (papers/003, Figure 3).

    There is a row for each kept round, and a column for each of five clients: those at the minimum, the quartiles and
    the maximum of entropy after the last round. Bars are the client's test examples by confidence, with correct
    predictions in colour.
    """
    rounds, ids, seen = document["rounds"], document["clients"]["ids"], document["clients"]["seen"]
    columns = _pictured(rounds[-1]["entropy"])
    figure = sheet(FULL, 0.45 + 1.35 * len(rounds))
    grid = figure.subplots(len(rounds), max(3, len(columns)), sharex=True, sharey="row", squeeze=False)
    for k, (one, line) in enumerate(zip(rounds, grid, strict=True)):
        line[0].set_ylabel(f"round {one['round']}")
        for client, axes in zip(columns, line, strict=False):
            title = f"{ids[client]}\n" if k == 0 else ""
            if one["examples"][client] is None:
                axes.set_title(f"{title}no answer", fontsize=7.5, fontweight="normal")
                continue
            examples, right = (np.asarray(one[key][client], dtype=np.float64) for key in ("examples", "right"))
            group = "seen" if seen[client] else "unseen"
            for counts, colour in ((examples, OTHER), (right, COLOURS[group])):
                axes.stairs(counts / examples.sum(), document["edges"], fill=True, color=colour)
            text = f"accuracy {right.sum() / examples.sum():.0%}\n"
            text += f"H {one['entropy'][client]:.2f}, I {one['mutual_information'][client]:.3f}"
            axes.set_title(f"{title}{text}", fontsize=7.5, fontweight="normal")
        line[0].set_ylim(bottom=0)
        percent(line[0].yaxis, bins=3)
        for axes in line[len(columns) :]:
            axes.set_visible(False)
    for axes in grid[-1]:
        axes.set(xlim=(0, 1), xlabel="confidence")
        percent(axes.xaxis, bins=3)
    return figure


@as_svg
def draw_accuracy_by_uncertainty(document: Document) -> Figure:
    """Draw each client's accuracy after the last round over its entropy and over its mutual information."""
    last = document["rounds"][-1]
    clients = [i for i, counts in enumerate(last["examples"]) if counts is not None]
    seen = np.asarray(document["clients"]["seen"], dtype=bool)[clients]
    accuracy = np.array([sum(last["right"][i]) / sum(last["examples"][i]) for i in clients])
    figure = sheet(HALF, 4.6)
    for key, axes in zip(("entropy", "mutual_information"), figure.subplots(2, 1), strict=True):
        x, name = np.array([last[key][i] for i in clients], dtype=np.float64), key.replace("_", " ")
        dots(axes, x, accuracy, seen)
        r = _rank_correlation(x, accuracy)
        axes.set(title=f"Accuracy by {name}", ylabel="accuracy")
        axes.set_xlabel(f"mean {name}, nats" + ("" if r is None else f" (Spearman's ρ {r:.2f})"))
        percent(axes.yaxis, bins=4)
    figure.axes[0].legend(loc="best")
    return figure


def _rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Return Spearman's coefficient, with mean ranks for ties; None for fewer than three values or constant ones."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    ranks = []
    for values in (a, b):  # a report of a run needs no scipy
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _pictured(entropy: Sequence[float | None]) -> list[int]:
    """Return clients at the minimum, quartiles and maximum of entropy, or all if few, in ascending order of entropy."""
    ordered = sorted((value, i) for i, value in enumerate(entropy) if value is not None)
    places = np.unique(np.linspace(0, len(ordered) - 1, min(PICTURED, len(ordered))).round().astype(int))
    return [ordered[place][1] for place in places]


def _groups(document: Document) -> dict[str, Sequence[Sequence[float]]]:
    """Return the available rows of ``seen`` and ``unseen`` (own model) and ``global`` (global model, all clients)."""
    groups = {name: rows for name, rows in (document["personal"] or {}).items() if rows}
    parts = [np.asarray(rows, dtype=np.float64) for rows in (document["global"] or {}).values() if rows]
    if parts:
        examples = np.sum([part[:, :1] for part in parts], axis=0)
        means = np.sum([part[:, :1] * part[:, 1:] for part in parts], axis=0) / np.maximum(examples, 1)
        groups["global"] = np.concatenate([examples, means], axis=1).tolist()
    return groups
