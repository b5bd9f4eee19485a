"""Model of an experiment for described inputs, with integers unchanged or standardized as the model needs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel
from fedloom.models.registry import ModelChoice
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.classification import CLASSIFICATION

log = logging.getLogger("fedloom.models")


@dataclass(frozen=True)
class FittedModel:
    """Model, and the form in which it takes integers.

    Attributes
    ----------
    model
        The clients' model.
    standardizes
        True if integers are standardized like features before the model gets them.
    """

    model: FlatModel
    standardizes: bool = False


def fitted(
    choice: ModelChoice,
    specs: Mapping[str, Any],
    outputs: int,
    task: PredictionTask = CLASSIFICATION,
    target_shape: tuple[int, ...] = (),
) -> FittedModel:
    """Make the model for inputs, and K outputs of a task.

    A model that accepts integers gets them unchanged. Any other model gets them standardized like features; if it
    accepts integers in principle, the log records this.

    Raise ExperimentError if the model does not fit; the message names the key.

    Parameters
    ----------
    specs
        Description of each input tensor, with ``kind`` and ``shape``; the name of a single one is empty.
    """
    integers = [name for name, spec in specs.items() if spec.kind == "integers"]
    if not integers:
        return FittedModel(_built(choice, specs, outputs, task, target_shape))
    refusal: ExperimentError | None = None
    if "integers" in choice.takes:
        try:
            return FittedModel(_built(choice, specs, outputs, task, target_shape))
        except ExperimentError as error:
            refusal = error
    numbers = {
        name: dataclasses.replace(spec, kind="features", high=None) if name in integers else spec
        for name, spec in specs.items()
    }
    try:
        model = _built(choice, numbers, outputs, task, target_shape)
    except ExperimentError as error:
        raise (refusal or error) from error
    if refusal is not None:
        names = ", ".join(f"the integers {name}".strip() for name in integers)
        log.info("model.name: %s cannot take %s, and gets them standardized like features", choice.name, names)
    return FittedModel(model, standardizes=True)


def _built(
    choice: ModelChoice, specs: Mapping[str, Any], outputs: int, task: PredictionTask, target_shape: tuple[int, ...]
) -> FlatModel:
    single = specs.get("")
    if single is None:
        return choice.build(specs, outputs, "named", task, target_shape)
    shape = specs if single.kind == "integers" else single.shape
    return choice.build(shape, outputs, single.kind, task, target_shape)
