"""Content of ``clients.csv``, ``confusion.json``, ``confusion.csv`` and ``calibration.json``."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.data.manifest import ClientEntry
from fedloom.evaluation.plan import READINGS, SPLITS, EvaluationResult
from fedloom.evaluation.uncertainty import EDGES, calibration_rows
from fedloom.tasks.auroc import Auroc
from fedloom.tasks.base import ratio
from fedloom.tasks.classification import calibration_errors
from fedloom.tasks.multilabel import LabelCounts
from fedloom.tasks.segmentation import ClassOverlap

ELSEWHERE_OF_CLASSES = ("accuracy", "log_loss", "ece")
"""Metrics of classification that have columns of their own: of both readings, and of calibration."""


def client_rows(evaluation: EvaluationResult, entries: Iterable[ClientEntry]) -> list[dict[str, str]]:
    """Return the lines of ``clients.csv``, in the order of the evaluation.

    Columns: ``id``, ``seen`` (true, false), ``train``, ``validation``, ``test`` (examples), ``labels`` (classes of the
    train split, separated by spaces), then for each predictor ``<p>_accuracy_unmasked``, ``<p>_loss_unmasked``,
    ``<p>_accuracy_masked``, ``<p>_loss_masked`` on the test split, empty without such a reading; ``<p>_ece``, its own
    calibration error there (unmasked); ``<p>_<metric>_unmasked`` for the other metrics of the task, e.g.
    ``<p>_rmse_unmasked``, empty where undefined; and ``owner``, the name of its natural owner, empty for partitioned
    examples. Where metrics are summed securely, all results are empty.
    """
    by_id = {entry.id: entry for entry in entries}
    columns = [_predictor_columns(evaluation, predictor) for predictor in evaluation.predictors]
    clients = evaluation.clients
    if evaluation.moments is not None:  # rows of the evaluation are groups, and no client's numbers are known
        clients = tuple(by_id)
        columns = [[dict.fromkeys(of_groups[0], "")] * len(clients) for of_groups in columns]
    rows = []
    for i, client in enumerate(clients):
        entry = by_id[client]
        row = {
            "id": client,
            "seen": str(entry.seen).lower(),
            **{split: str(entry.size(split)) for split in ("train", "validation", "test")},
            "labels": " ".join(str(label) for label, count in enumerate(entry.class_counts["train"]) if count),
        }
        for column in columns:
            row |= column[i]
        rows.append({**row, "owner": entry.owner or ""})
    return rows


def _predictor_columns(evaluation: EvaluationResult, predictor: str) -> list[dict[str, str]]:
    """Return each client's accuracies, losses and calibration error of one predictor, empty where unknown."""
    errors = calibration_errors(evaluation.calibration[:, evaluation.predictors.index(predictor)]).tolist()
    rows: list[dict[str, str]] = [{} for _ in evaluation.clients]
    for reading in READINGS:
        counts = evaluation.of(predictor, "test", reading).tolist()
        for row, (correct, total, loss) in zip(rows, counts, strict=True):
            accuracy = correct / total if total and evaluation.classes else math.nan
            row[f"{predictor}_accuracy_{reading}"] = _number(accuracy)
            row[f"{predictor}_loss_{reading}"] = _number(loss / total if total else math.nan)
    for row, error in zip(rows, errors, strict=True):
        row[f"{predictor}_ece"] = _number(error)
    places = evaluation.present.nonzero().flatten().tolist()
    for name, values in evaluation.metrics(predictor, "test", evaluation.present).items():
        if name not in (ELSEWHERE_OF_CLASSES if evaluation.classes else ("loss",)):
            for row in rows:
                row[f"{predictor}_{name}_unmasked"] = ""
            for i, value in zip(places, values.tolist(), strict=True):
                rows[i][f"{predictor}_{name}_unmasked"] = "" if math.isnan(value) else f"{value:.9g}"
    return rows


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"


def confusion_document(evaluation: EvaluationResult, class_names: Sequence[str]) -> dict[str, Any]:
    """Return the content of ``confusion.json``: predicted against true classes on the test split, unmasked.

    ``round``, ``classes``, and for each predictor (None if the method lacks it) ``seen`` and ``unseen``: sums over the
    group's clients, a row per class and a column per predicted class, None for a group without clients.
    """

    def summed(p: int, members: Tensor) -> Any:
        return evaluation.confusion[members, p].sum(0).tolist() if members.any() else None

    return {"round": evaluation.round, "classes": list(class_names), **evaluation.by_group(summed)}


def confusion_table(evaluation: EvaluationResult) -> str:
    """Return the content of ``confusion.csv``: each personal model's predicted and true classes, test split, unmasked.

    It has a line ``id,class,predicted,examples`` for each pair of classes that occurs, in the order of the evaluation,
    with classes by number. Clients that did not answer, or have no labelled test examples, have no lines; nor has any
    client if metrics are summed securely.
    """
    text, p = io.StringIO(), evaluation.predictors.index("personal")
    text.write("id,class,predicted,examples\n")
    if evaluation.moments is not None:
        return text.getvalue()
    for client, matrix, present in zip(evaluation.clients, evaluation.confusion[:, p], evaluation.present, strict=True):
        if present:
            places = matrix.nonzero()
            for (j, k), n in zip(places.tolist(), matrix[places.unbind(1)].tolist(), strict=True):
                text.write(f"{client},{j},{k},{n}\n")
    return text.getvalue()


def calibration_document(evaluation: EvaluationResult) -> dict[str, Any]:
    """Return the content of ``calibration.json``: accuracy by confidence on the test split, unmasked.

    ``round``; ``edges``, the bin edges; and for each predictor (None if the method lacks it) ``seen`` and ``unseen``:
    for each bin the number of examples of the group, their mean confidence and their accuracy. None for a group without
    examples.
    """
    rows = evaluation.by_group(lambda p, members: calibration_rows(evaluation.calibration[members, p]))
    return {"round": evaluation.round, "edges": EDGES, **rows}


def output_document(evaluation: EvaluationResult) -> dict[str, Any] | None:
    """Return the metrics of each output on the test split, over all examples of a group together.

    Returns
    -------
    dict or None
        ``round``; ``names`` of the K labels or classes; ``metrics``, the names of their metrics; and for each predictor
        (None if the method lacks it) ``seen`` and ``unseen``: for each output ``true``, its number of true examples or
        pixels, and its metrics, null where undefined. None for a group without clients. None for tasks other than
        multilabel and segmentation.
    """
    targets, kind = evaluation.plan.targets, evaluation.plan.targets.kind
    if not kind.metrics_by_output:
        return None

    def rows(p: int, members: Tensor) -> list[dict[str, float | None]] | None:
        sums = evaluation.sums[members, p, SPLITS.index("test")]
        return _of_outputs(evaluation, sums.sum(0)) if len(sums) else None

    return {
        "round": evaluation.round,
        "names": list(targets.names) or [f"{kind.output} {k}" for k in range(targets.outputs)],
        "metrics": list(kind.metrics_by_output),
        **evaluation.by_group(rows),
    }


def _of_outputs(evaluation: EvaluationResult, sums: Tensor) -> list[dict[str, float | None]]:
    """Return the entries of :func:`output_document` for each output, given sums over clients ``[K]``."""
    columns: dict[str, Tensor] = {}
    parts = evaluation.plan.sums
    for part, values in zip(parts, torch.split(sums, [part.size for part in parts]), strict=True):
        if isinstance(part, Auroc):
            columns["auroc"] = _areas(values[2:].reshape(part.labels, -1))
        elif isinstance(part, LabelCounts):
            right, predicted, true = values[3:].reshape(3, part.labels)
            columns |= {"true": true, "f1": ratio(2 * right, predicted + true)}
        elif isinstance(part, ClassOverlap):
            right, predicted, true = values.reshape(3, part.classes)
            union = predicted + true - right
            columns |= {"true": true, "iou": ratio(right, union), "dice": ratio(2 * right, predicted + true)}
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [{name: None if math.isnan(x) else x for name, x in zip(columns, row, strict=True)} for row in rows]


def _areas(histograms: Tensor) -> Tensor:
    """Return the area under the ROC curve of each label, given its histograms ``[K, 2 * BINS]``."""
    alone = torch.nn.functional.pad(histograms, (2, 0))  # the sums of K tasks of one label each
    return Auroc(1, of_classes=False).values(alone, pooled=True)["auroc"]
