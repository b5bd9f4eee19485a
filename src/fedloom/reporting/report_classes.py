"""Sections of a report on classification: clients one by one, confusion, calibration, uncertainty, descriptors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.core.words import pluralize
from fedloom.errors import DataError
from fedloom.reporting.page import DASH, ConfusionCard, Panel, Part
from fedloom.reporting.report_results import NAMED, client_row, group_of, main_reading, owner_of, small_table
from fedloom.reporting.report_setup import summary_of
from fedloom.reporting.tables import Cell, Table, TableRow, table_row
from fedloom.reporting.words import GROUP_TITLES, in_percent
from fedloom.runs.folder import RunFolder

CARDS = 1000
"""Maximum number of clients for which each gets a card; every card adds half a kilobyte to the page."""

CARD_CLASSES = 12
"""Maximum number of classes in a card's confusion matrix: the most frequent ones."""


def _clients_by_id(run: RunFolder) -> dict[str, dict[str, str]]:
    """Return the rows of ``clients.csv`` by id; empty if it cannot be read."""
    try:
        return {row["id"]: row for row in run.clients()}
    except DataError:
        return {}


def each_client(run: RunFolder) -> Part:
    """Return a card for each client with its data and its own model's confusion matrix."""
    from fedloom.reporting.figures import class_label

    rows, confusions, reading = run.clients(), run.confusions(), main_reading(run)
    manifest = run.manifest()
    names = [class_label(name) for name in manifest.class_names]
    counts = {client.id: client.class_counts["train"] for client in manifest.clients}
    if len(rows) > CARDS:
        return Part(text=f"Runs of more than {CARDS:,} clients have their confusion matrices in confusion.csv only.")
    cards = []
    for k, row in enumerate(rows):
        accuracy = row.get(f"personal_accuracy_{reading}")
        facts = [f"accuracy {in_percent(float(accuracy))} %"] if accuracy else ["not measured"]
        facts += [pluralize(int(row["train"]), "training example"), _mix(counts.get(row["id"], ()), names)]
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
    return Table(headings, (("", tuple(rows)),), small=True) if rows else None


def _mix(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return the classes of a client's training data in percent, most frequent first; empty if unknown."""
    most = sorted((k for k, n in enumerate(counts) if n), key=lambda k: (-counts[k], k))
    parts = [f"{names[k]} ({100 * counts[k] / sum(counts):.0f} %)" for k in most[:NAMED]]
    return ", ".join([*parts, *([f"{len(most) - NAMED} more"] if len(most) > NAMED else [])])


def confusion_matrices(run: RunFolder) -> Part:
    """Return the confusion matrices of the seen and unseen clients' models and of the global model."""
    from fedloom.reporting import figures

    document = run.json("confusion.json")
    names, counts = document["classes"], _confusion_counts(document)
    if not counts:
        raise DataError(f"{run.path / 'confusion.json'}: no client answered in round {document['round']}")
    titles = {key: f"{key.capitalize()} clients, personalized model" for key in ("seen", "unseen")}
    titles["global"] = "All clients, global model"
    wide = figures.confusion_is_wide(names)
    panels = tuple(
        Panel(f"confusion-{key}", figures.draw_confusion(each, names, titles[key]), wide)
        for key, each in counts.items()
    )
    text = (
        f"Test split, unmasked, round {document['round']}. Each row is a class and sums to 100 %. The colour is the "
        "square root of the share, so that rare errors can be seen."
    )
    labels = [figures.class_label(name) for name in names]
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


def calibration(run: RunFolder) -> Part:
    """Return the reliability diagram, calibration errors and uncertainties."""
    from fedloom.reporting.uncertainty_figures import draw_reliability

    panel = Panel("reliability", draw_reliability(run.json("calibration.json")))
    last, _ = run.last_evaluation() or ({}, 0)
    of_clients = {key: of.get("ece_clients") for key, of in summary_of(run).get("uncertainty", {}).items() if of}
    rows = []
    for key, label in GROUP_TITLES.items():
        found = last.get("uncertainty", {}).get(key)
        if found is not None:
            own = DASH if of_clients.get(key) is None else in_percent(of_clients[key])
            nats = (f"{found[name]:.3f}" for name in ("entropy", "mutual_information"))
            rows.append(table_row(label, in_percent(found["ece"]), own, *nats, colour=key))
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
    from fedloom.reporting.uncertainty_figures import draw_accuracy_by_uncertainty, draw_confidence_over_training

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


def descriptors(run: RunFolder) -> Part:
    """Return maps of the clients' descriptors, and their correlation with the clients' data."""
    from fedloom.reporting import descriptor_figures
    from fedloom.reporting.figures import class_label

    document, manifest = run.json("descriptors.json"), run.manifest()
    names = [class_label(name) for name in manifest.class_names]
    about = {
        client.id: (f"{client.id} ({client.owner})" if client.owner else client.id, client.class_counts["train"])
        for client in manifest.clients
    }
    points = []
    for id in document["clients"]["ids"]:
        name, counts = about.get(id, (id, ()))
        points.append((id, ": ".join(filter(None, (name, _mix(counts, names))))))
    panels = [
        Panel("descriptors", descriptor_figures.draw_map(document, manifest.class_names), points=tuple(points)),
        Panel("correlation", descriptor_figures.draw_correlation(document)),
    ]
    if len(document["maps"]) > 1:
        panels.append(Panel("descriptors-training", descriptor_figures.draw_maps(document), wide=True))
    excluded = document["excluded"][-1]
    text = (
        "Maps: a point per client, coloured by its most frequent class, with diamonds for unseen clients. In the large "
        "map, hover over a point to see the client's classes, and click on it to see its confusion matrix. All are "
        f"drawn on the two principal axes of round {document['maps'][-1]['round']}, each around its own mean; the "
        "small ones have one scale. Rank correlation: for each unseen client, Spearman's coefficient between its "
        "descriptor's distances and its class proportions' distances to all clients; mean and ± one standard deviation "
        "over unseen clients. The dotted line is the value at the first evaluation: an untrained embedding network "
        "that sees labels already correlates."
        + (f" {pluralize(excluded, 'unseen client')} without a coefficient (all distances equal)." if excluded else "")
    )
    return Part(panels=tuple(panels), columns=2, text=text)
