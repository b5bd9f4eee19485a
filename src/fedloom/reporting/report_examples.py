"""Sections of a report on single outputs, and on single test examples of runs that had the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedloom.core.words import pluralize
from fedloom.errors import DataError
from fedloom.reporting.page import DASH, Panel, Part
from fedloom.reporting.report_results import group_of, small_table
from fedloom.reporting.tables import Table, table_row
from fedloom.reporting.words import GROUP_TITLES
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import metric_title, significant

NUMBERS = 3
"""Maximum number of predicted numbers that have figures."""


MANY_OUTPUTS = 100
"""Maximum number of labels or classes in the table: those with the worst results."""


def outputs(run: RunFolder) -> Part:
    """Return a table of the metrics of each label, or of each class of pixels, worst first."""
    document = run.json("outputs.json")
    names, metrics = document["names"], document["metrics"]
    columns = {key: document["personal"][key] for key in ("seen", "unseen")}
    if document["global"] is not None:
        columns["global, seen"] = document["global"]["seen"]
    columns = {key: rows for key, rows in columns.items() if rows is not None}
    if not columns:
        raise DataError(f"{run.path / 'outputs.json'}: no client answered in round {document['round']}")
    first = next(iter(columns.values()))
    worst = sorted(range(len(names)), key=lambda k: (math.inf if (x := first[k][metrics[0]]) is None else x, k))
    rows = []
    for k in worst[:MANY_OUTPUTS]:
        cells = [
            DASH if (x := found[k][metric]) is None else significant(x)
            for found in columns.values()
            for metric in metrics
        ]
        rows.append(table_row(names[k], f"{first[k]['true']:,.0f}", *cells))
    titles = {**GROUP_TITLES, "global, seen": "global model, seen clients"}
    above = (("", 2), *((titles[key], len(metrics)) for key in columns))
    headings = ("name", "true", *(metric_title(metric) for _ in columns for metric in metrics))
    what = "label" if metrics[0] == "auroc" else "class"
    text = (
        f"Test split, round {document['round']}, all examples of a group together; the {what} with the lowest "
        f"{metric_title(metrics[0])} first. True: number of "
        + ("examples that have the label." if what == "label" else "pixels of the class.")
        + (f" Only the {MANY_OUTPUTS} worst of {len(names)} are listed." if len(names) > MANY_OUTPUTS else "")
    )
    return Part(tables=(Table(headings, (("", tuple(rows)),), above=above),), text=text)


def examples(run: RunFolder) -> Part:
    """Return pictures or points of the clients with the worst results."""
    document = run.json("examples.json")
    if not document["clients"]:
        raise DataError(f"{run.path / 'examples.json'}: no client has test examples")
    return _numbers(document) if document["task"] == "regression" else _masks(document)


def _numbers(document: Mapping[str, Any]) -> Part:
    """Return predicted against true numbers, and residuals by client."""
    from fedloom.reporting import example_figures

    k = len(document["clients"][0]["true"][0])
    names = document["names"] or [""] * k
    panels = []
    for i, name in enumerate(names[:NUMBERS]):
        suffix = f"-{i + 1}" if k > 1 else ""
        panels.append(Panel(f"predictions{suffix}", example_figures.draw_predictions(document, i, name)))
        panels.append(Panel(f"residuals{suffix}", example_figures.draw_residuals(document, i, name)))
    rows = []
    for client in document["clients"]:
        pairs = list(zip(client["true"], client["predicted"], strict=True))
        for i, name in enumerate(names):
            residuals = [predicted[i] - true[i] for true, predicted in pairs]
            mean = math.fsum(residuals) / len(residuals)
            off = math.sqrt(math.fsum(r * r for r in residuals) / len(residuals))
            label = f"{client['id']}, {name}" if k > 1 else client["id"]
            values = (significant(mean), significant(off), str(len(residuals)))
            rows.append(table_row(label, *values, colour=group_of({"seen": str(client["seen"]).lower()})))
    headings = ("client", "mean residual", "root mean square", "examples")
    text = (
        f"Personalized models after round {document['round']} on test examples of the "
        f"{pluralize(len(document['clients']), 'client')} with the worst results, in the targets' own units. Residual: "
        "predicted minus true; a mean far from zero is a bias. Boxes: quartiles, with whiskers to the 5th and 95th "
        "percentile." + (f" Figures show the first {NUMBERS} of {k} numbers." if k > NUMBERS else "")
    )
    return Part(panels=tuple(panels), tables=(small_table("Residuals", headings, rows),), columns=2, text=text)


def _masks(document: Mapping[str, Any]) -> Part:
    """Return input, truth and prediction of each client's worst image, and its share of wrong pixels."""
    from fedloom.reporting import example_figures
    from fedloom.reporting.figures import class_label

    classes = document["outputs"]
    names = [class_label(name) for name in document["names"]] or [f"class {i}" for i in range(classes)]
    rows = []
    for client in document["clients"]:
        pairs = [
            (true, found)
            for line, predicted in zip(client["true"], client["predicted"], strict=True)
            for true, found in zip(line, predicted, strict=True)
            if 0 <= true < classes
        ]
        missed = [names[true] for true, found in pairs if true != found]
        most = max(sorted(set(missed)), key=missed.count, default="none")
        share = f"{100 * len(missed) / len(pairs):.1f}" if pairs else "–"
        rows.append(table_row(client["id"], share, most, colour=group_of({"seen": str(client["seen"]).lower()})))
    panel = Panel("examples", example_figures.draw_segmentations(document), wide=True)
    text = (
        f"Personalized models after round {document['round']}: for each of the "
        f"{pluralize(len(document['clients']), 'client')} with the worst results, the test image with the most wrong "
        "pixels. Pixels without a class are grey. The table gives each image's share of wrong pixels, and the true "
        "class that was missed most."
    )
    table = small_table("Wrong pixels", ("client", "wrong, %", "missed most"), rows)
    return Part(panels=(panel,), tables=(table,), columns=2, text=text)
