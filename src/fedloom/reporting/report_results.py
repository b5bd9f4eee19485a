"""Sections of a report on the quality of models: learning curves, results, clients, confusion, calibration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.core.words import pluralize
from fedloom.errors import DataError
from fedloom.reporting import inputs
from fedloom.reporting.page import DASH, FEWEST_POINTS, Cell, ConfusionCard, Panel, Part, Table, TableRow, table_row
from fedloom.reporting.report_setup import summary_of
from fedloom.reporting.words import in_percent, is_masked
from fedloom.runs.folder import RunFolder

NAMED = 10
"""Maximum number of rows of a small table."""

FEW_CLIENTS = 20
"""Maximum number of clients that are all listed by name."""

CARDS = 1000
"""Maximum number of clients for which each gets a card; every card adds half a kilobyte to the page."""

CARD_CLASSES = 12
"""Maximum number of classes in a card's confusion matrix: the most frequent ones."""

GROUPS = {"seen": "seen clients", "unseen": "unseen clients", "global": "global model"}


def has_classes(run: RunFolder) -> bool:
    """Return whether the run's data have classes; True if its partition cannot be read."""
    try:
        return run.manifest().classes > 0
    except DataError:
        return True


def learning_curves(run: RunFolder) -> Part:
    """Return test results and training loss over rounds."""
    from fedloom.reporting import figures

    lines, losses = run.metrics(), run.training_loss()
    if not lines:
        raise DataError(f"{run.path / 'metrics.jsonl'}: has no evaluated round")
    panels, text = [], []
    if len(lines) < FEWEST_POINTS:
        rounds = ", ".join(str(line["round"]) for line in lines)
        text.append(f"Evaluated rounds: {rounds}. A curve of test results needs {FEWEST_POINTS} or more.")
    elif has_classes(run):
        panels.append(Panel("learning-curve", figures.draw_learning_curve(lines, "accuracy")))
        text.append("Test: mean of the clients' accuracies, ± one standard deviation over clients.")
    else:
        panels.append(Panel("learning-curve", figures.draw_learning_curve(lines, "loss")))
        text.append("Test: mean of the clients' losses. The loss is the model's own, as the data have no classes.")
    if len(losses) >= FEWEST_POINTS:
        panels.append(Panel("training-loss", figures.draw_training_loss(losses)))
        text.append("Training: the method's own loss, mean over the cohort of each round.")
    return Part(panels=tuple(panels), columns=2, text=" ".join(text))


def result_table(run: RunFolder) -> Part:
    """Return the results table: the last round in both readings, and the best round."""
    lines = run.metrics()
    if not lines:
        raise DataError(f"{run.path / 'metrics.jsonl'}: has no evaluated round")
    last, best = lines[-1], _best(run)
    masked = any(is_masked(last[key]) for key in GROUPS if last[key] is not None)
    main, other = ("masked", "unmasked") if masked else ("unmasked", "masked")
    is_best = best is not None and best["round"] == last["round"]
    which = f"Round {last['round']} ({'last and best by validation' if is_best else 'last'})"
    blocks = [(f"{which}, {main}", _rows(last))]
    otherwise = _other_reading(last, other)
    if any(group is not None for group in otherwise.values()):
        blocks.append((f"{which}, {other}", _rows(otherwise)))
    if best is not None and not is_best:
        blocks.append((f"Round {best['round']} (best by validation), {main}", _rows(best)))
    text = (
        "Each client counts once in mean, std (population) and worst. Worst decile: mean of the worst tenth of clients "
        "(rounded up). Pooled: correct predictions over examples. Masked: only the labels of the client's own training "
        "data can be predicted. Loss: mean over clients, in nats. The best round has the highest pooled validation "
        "accuracy of seen clients (data without classes: the lowest validation loss), the earliest on ties; test data "
        "are not used to choose it."
    )
    headings = ("test accuracy, %", "clients", "mean ± std", "worst", "worst decile", "pooled", "loss")
    return Part(tables=(Table(headings, tuple(blocks)),), text=" ".join([text, *_last_evaluations(run)]))


def _last_evaluations(run: RunFolder) -> list[str]:
    """Return a sentence on the last evaluations together, if the run is finished and has several."""
    found = summary_of(run).get("last_evaluations")
    if found is None or found["evaluations"] < 2:  # a run of an older version, or one in progress
        return []
    means = []
    for key, label in GROUPS.items():
        over = (found[key] or {}).get("accuracy_mean")
        if over is not None:
            mean, *ends = (in_percent(over[name]) for name in ("mean", "lowest", "highest"))
            means.append(f"{label} {mean} ({' to '.join(ends)})")
    if not means:
        return []
    first, last = found["rounds"]
    return [
        f"Mean of the last {found['evaluations']} evaluations, rounds {first} to {last} (lowest to highest), in "
        f"percent: {'; '.join(means)}. Reporting the highest of several evaluations would amount to choosing by test "
        "data."
    ]


def _best(run: RunFolder) -> Mapping[str, Any] | None:
    """Return the best round; for a finished run it is in the summary, so that torch is not needed."""
    try:
        found: Mapping[str, Any] | None = inputs.checked(run, "summary.json")["best"]
        return found
    except DataError:
        from fedloom.evaluation.summary import best

        return best(run.evaluations())


def _other_reading(groups: Mapping[str, Any], other: str) -> dict[str, Any]:
    found: dict[str, Any] = {key: None if groups[key] is None else groups[key][other] for key in GROUPS}
    if found["global"] is not None:
        inner = _other_reading({**groups["global"], "global": None}, other)
        found["global"] = {**found["global"], "seen": inner["seen"], "unseen": inner["unseen"]}
    return found


def _rows(groups: Mapping[str, Any]) -> tuple[TableRow, ...]:
    rows = [
        table_row(f"{key} clients, personalized model", *_cells(groups[key]), colour=key) for key in ("seen", "unseen")
    ]
    overall = groups["global"]
    if overall is not None:
        rows.append(table_row("all clients, global model", *_cells(overall), colour="global"))
        inner = (key for key in ("seen", "unseen") if overall[key] is not None)
        rows += [table_row(f"{key} clients", *_cells(overall[key])) for key in inner]
    return tuple(rows)


def _cells(group: Mapping[str, Any] | None) -> tuple[str, ...]:
    if group is None:
        return (DASH,) * 6
    if group["accuracy_mean"] is None:
        return (str(group["clients"]), *(DASH,) * 4, f"{group['loss_mean']:.4g}")
    return (
        str(group["clients"]),
        f"{in_percent(group['accuracy_mean'])} ± {in_percent(group['accuracy_std'])}",
        *(in_percent(group[f"accuracy_{key}"]) for key in ("worst", "worst_decile", "pooled")),
        f"{group['loss_mean']:.3f}",
    )


def _reading(run: RunFolder) -> str:
    """Return the primary reading, ``masked`` or ``unmasked``."""
    last, _ = run.last_evaluation() or ({}, 0)
    groups = (last.get(key) for key in ("seen", "unseen"))
    return "masked" if any(is_masked(group) for group in groups if group is not None) else "unmasked"


def client_results(run: RunFolder) -> Part:
    """Return the distribution of results over clients, and the clients with the lowest ones."""
    from fedloom.reporting import figures

    rows, reading = run.clients(), _reading(run)
    panels = [Panel("clients", figures.draw_distribution(rows, reading))]
    text = (
        f"Each client's test accuracy ({reading}, last evaluation). Distribution: the share of clients at or below an "
        "accuracy, so right is better. The thick foot of a line is the worst decile."
    )
    tables = [_worst(rows, reading, _class_names(run))]
    if f"global_accuracy_{reading}" in rows[0]:
        panels.append(Panel("personalization", figures.draw_gains(rows, reading)))
        tables.append(_changed(rows, reading))
        text += " Gain: above the diagonal, the personalized model is better on the client's test data."
    return Part(panels=tuple(panels), tables=tuple(tables), columns=2, text=text)


def _small(title: str, headings: tuple[str, ...], rows: Sequence[TableRow], *, wide: bool = False) -> Table:
    return Table(headings, (("", tuple(rows)),), title, small=True, wide=wide)


def _worst(rows: Sequence[Mapping[str, str]], reading: str, names: Mapping[str, str]) -> Table:
    """Return a table of the clients with the lowest accuracy, or of all clients if they are few."""
    column = f"personal_accuracy_{reading}"
    measured = sorted((row for row in rows if row[column]), key=lambda row: (float(row[column]), row["id"]))
    few = len(measured) <= FEW_CLIENTS
    shown = [
        _client(row, in_percent(float(row[column])), row["train"], _classes(row["labels"].split(), names))
        for row in (measured if few else measured[: min(NAMED, math.ceil(len(measured) / 10))])
    ]
    title = "Clients, lowest accuracy first" if few else "Clients of lowest accuracy"
    return _small(title, ("client", "accuracy, %", "training examples", "classes"), shown)


def _changed(rows: Sequence[Mapping[str, str]], reading: str) -> Table:
    """Return a table of the clients with the largest losses and gains from personalization."""
    columns = (f"global_accuracy_{reading}", f"personal_accuracy_{reading}")
    measured = [row for row in rows if all(row[column] for column in columns)]
    both = [(row, float(row[columns[0]]), float(row[columns[1]])) for row in measured]
    both.sort(key=lambda each: (each[2] - each[1], each[0]["id"]))
    half = min(NAMED // 2, len(both) // 2)
    shown = [
        _client(row, in_percent(before), in_percent(after), f"{100 * (after - before):+.1f}")
        for row, before, after in both[:half] + both[len(both) - half :]
    ]
    headings = ("client", "global, %", "personalized, %", "gain, points")
    return _small("Smallest and largest gains by personalization", headings, shown)


def _client(row: Mapping[str, str], *cells: str) -> TableRow:
    return table_row(row["id"], *cells, colour=_group(row), note=_owner(row))


def _group(row: Mapping[str, str]) -> str:
    return "seen" if row["seen"] == "true" else "unseen"


def _owner(row: Mapping[str, str]) -> str:
    owner = row.get("owner", "")
    return owner if owner != row["id"] else ""


def _classes(labels: Sequence[str], names: Mapping[str, str]) -> str:
    """Return the names of a client's classes if there are at most two, else their number."""
    return ", ".join(names.get(label, label) for label in labels) if len(labels) <= 2 else str(len(labels))


def _clients_by_id(run: RunFolder) -> dict[str, dict[str, str]]:
    """Return the rows of ``clients.csv`` by id; empty if it cannot be read."""
    try:
        inputs.check_files(run, ("clients.csv",))
        return {row["id"]: row for row in run.clients()}
    except DataError:
        return {}


def _class_names(run: RunFolder) -> dict[str, str]:
    """Return class names by number; empty if the partition cannot be read."""
    try:
        return {str(k): name for k, name in enumerate(run.manifest().class_names)}
    except DataError:
        return {}


def each_client(run: RunFolder) -> Part:
    """Return a card for each client with its data and its own model's confusion matrix."""
    from fedloom.reporting.figures import class_label

    rows, confusions, reading = run.clients(), run.confusions(), _reading(run)
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
        cards.append(ConfusionCard(row["id"], f"c{k}", _group(row), _owner(row), about, table))
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
    title = f"Most frequent errors, {GROUPS[next(iter(counts))]}"
    return _small(title, ("true → predicted, %", *counts), rows, wide=wide)


def calibration(run: RunFolder) -> Part:
    """Return the reliability diagram, calibration errors and uncertainties."""
    from fedloom.reporting.uncertainty_figures import draw_reliability

    panel = Panel("reliability", draw_reliability(run.json("calibration.json")))
    last, _ = run.last_evaluation() or ({}, 0)
    of_clients = {key: of.get("ece_clients") for key, of in summary_of(run).get("uncertainty", {}).items() if of}
    rows = []
    for key, label in GROUPS.items():
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
    table = _small("Calibration error and uncertainty", headings, rows)
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
        rows.append(_client(by_id.get(ids[i], {"id": ids[i], "seen": str(seen[i]).lower()}), right, *nats))
    headings = ("client", "accuracy, %", "entropy, nats", "mutual information, nats")
    text = (
        "Personalized model, test split, unmasked. Bars: share of a client's examples by confidence, with correct "
        "predictions in colour and wrong ones grey, after the first two evaluated rounds and the last. The clients are "
        "those at the minimum, the quartiles and the maximum of entropy after the last round. H and I: mean entropy of "
        "the prediction, and mean mutual information of prediction and model, in nats."
    )
    return Part(panels=panels, tables=(_small("Clients of highest entropy", headings, rows),), columns=2, text=text)


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
