"""Content of ``outputs.json``: the metrics of each label, or of each class of pixels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedloom.evaluation.plan import SPLITS
from fedloom.evaluation.summary import EvaluationResult
from fedloom.tasks.auroc import Auroc
from fedloom.tasks.multilabel import LabelCounts
from fedloom.tasks.segmentation import ClassOverlap
from fedloom.tasks.sums import ratio


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
    targets, wanted = evaluation.plan.targets, {"multilabel": ("auroc", "f1"), "segmentation": ("iou", "dice")}
    if targets.task not in wanted:
        return None
    kind = "label" if targets.task == "multilabel" else "class"

    def rows(p: int, members: Tensor) -> list[dict[str, float | None]] | None:
        sums = evaluation.sums[members, p, SPLITS.index("test")]
        return _of_outputs(evaluation, sums.sum(0)) if len(sums) else None

    return {
        "round": evaluation.round,
        "names": list(targets.names) or [f"{kind} {k}" for k in range(targets.outputs)],
        "metrics": list(wanted[targets.task]),
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
