"""Test examples and their predictions, for the report of a run whose data are on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.data.federated import ClientData
from fedloom.data.inputs import Inputs, each, take
from fedloom.data.spec import Targets
from fedloom.engine.trained import personalize_each, restore, torch_threads
from fedloom.models.predictors import Predictor
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import KINDS, TaskName, headline_of

EXAMPLES = "examples.json"

MOST = 100
"""Maximum number of test examples of a client."""

SIDE = 96
"""Maximum height and width of a shown image, in pixels; larger ones are thinned."""


def write_examples(folder: RunFolder, task: TaskName, targets: Targets) -> None:
    """Write ``examples.json`` of a finished run: predictions for the clients with the worst results.

    Nothing is written for tasks without ``shown_clients``, and for fields of numbers. The personalized models
    are those of the last checkpoint; the clients' data are read from the run's partition.

    Raise DataError if the partition is missing or damaged.
    """
    kind = KINDS[task]
    if not kind.shown_clients or (kind.is_number and len(targets.shape) > 1):
        return
    summary = folder.json("summary.json")
    headline = headline_of(summary)
    column = f"personal_{headline.name}_unmasked"
    rows = [row for row in folder.clients() if row.get(column)]
    rows.sort(key=lambda row: (headline.sign * float(row[column]), row["id"]))
    worst = {row["id"]: row for row in rows[: kind.shown_clients]}
    describe = _numbers if kind.is_number else _picture
    predicted_by_client = {
        client: describe(x, y, predictions, targets)
        for client, (x, y, predictions) in predicted(folder, [*worst]).items()
        if len(y)
    }
    clients = [
        {"id": client, "seen": worst[client]["seen"] == "true", **example}
        for client, example in predicted_by_client.items()
    ]
    document = {"round": summary["rounds"], "task": task, "names": list(targets.names), "outputs": targets.outputs}
    folder.write_json(EXAMPLES, {**document, "clients": clients})


def predicted(folder: RunFolder, clients: Sequence[str]) -> dict[str, tuple[Inputs, Tensor, Tensor]]:
    """Return inputs, targets and the personalized model's predictions of up to :data:`MOST` test examples by client.

    Clients without a personalized model, or without targets, are left out.
    """
    predictions: dict[str, tuple[Inputs, Tensor, Tensor]] = {}
    with torch_threads(1):  # restores the number of threads, which is changed inside
        parts, evaluator, dataset = restore(folder.path)

        def keep(client: ClientData, predictors: Mapping[str, Predictor]) -> None:
            if "personal" in predictors and client.test.y is not None:
                x: Any = take(client.test.x, slice(MOST))
                y = client.test.y[:MOST]
                predictions[client.id] = x, y.cpu(), predictors["personal"].predictions(x).cpu()

        personalize_each(parts, evaluator, dataset, clients, keep)
    return {client: predictions[client] for client in clients if client in predictions}


def _numbers(x: Inputs, y: Tensor, predictions: Tensor, targets: Targets) -> dict[str, Any]:
    """Return true and predicted numbers ``[n][k]`` in the targets' own units; the inputs ``x`` are not shown."""
    mean = torch.tensor(targets.mean or [0.0] * targets.outputs, dtype=torch.float64)
    std = torch.tensor(targets.std or [1.0] * targets.outputs, dtype=torch.float64)
    true, predicted_values = (t.reshape(len(y), -1).double() * std + mean for t in (y, predictions))
    return {"true": _rounded(true), "predicted": _rounded(predicted_values)}


def _rounded(values: Tensor) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in row] for row in values.nan_to_num().tolist()]


def _picture(x: Inputs, y: Tensor, predictions: Tensor, targets: Targets) -> dict[str, Any]:
    """Return the image, or the slice of a volume, with the most wrong pixels, with its true and predicted classes."""
    predicted_classes = predictions.argmax(1)
    if y.dim() > 3:
        y, predicted_classes, x = (
            y.flatten(0, 1),
            predicted_classes.flatten(0, 1),
            each(x, lambda t: _slices(t, targets.shape[0])),
        )
    wrong = ((predicted_classes != y) & (y < targets.outputs) & (y >= 0)).flatten(1).sum(1)
    worst = int(wrong.argmax())
    step = math.ceil(max(y.shape[1:]) / SIDE)
    thin = slice(None, None, step)
    values = {"true": y[worst, thin, thin].tolist(), "predicted": predicted_classes[worst, thin, thin].tolist()}
    image = _image(x, worst, tuple(y.shape[1:]))
    return values if image is None else {"image": image[thin, thin].tolist(), **values}


def _slices(x: Tensor, depth: int) -> Tensor:
    """Return the slices of volumes, ``[n, c, d, h, w] -> [n d, c, h, w]``; other inputs once for each slice."""
    return x.transpose(1, 2).flatten(0, 1) if x.dim() == 5 else x.repeat_interleave(depth, 0)


def _image(x: Inputs, i: int, shape: tuple[int, ...]) -> Tensor | None:
    """Return an input as a picture, ``[h, w]`` or ``[h, w, 3]`` of 0 to 255; None if no input has the masks' shape."""
    for tensor in x.values() if isinstance(x, Mapping) else [x]:
        picture = tensor[i].cpu().float()
        picture = picture if picture.dim() == 3 else picture[None]
        if tuple(picture.shape[1:]) == shape:
            picture = (picture if len(picture) == 3 else picture[:1]).nan_to_num()
            low, high = picture.min(), picture.max()
            levels = (255 * (picture - low) / (high - low).clamp(min=1e-9)).round().to(torch.int64)
            return levels.permute(1, 2, 0) if len(levels) == 3 else levels[0]
    return None
