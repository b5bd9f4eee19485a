"""Calls of a module: how it takes inputs, and what of its output are the logits."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.errors import ExperimentError
from fedloom.models.factories import KEY
from fedloom.models.module_inputs import ModuleInputs
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.trial import has_binary_form

_log = logging.getLogger("fedloom.models")

LOGITS = "logits"
"""Field of an output that is read by default."""


@dataclass(frozen=True)
class ModuleCall:
    """Way in which a module is called.

    Attributes
    ----------
    by_name
        True if named inputs are arguments of those names, False if one argument is a dict of them.
    field
        Field or position of the output, where that is no tensor.
    given, shape
        Shape of the module's output for one example, and the shape that the task needs, where they differ; both None
        where they do not.
    binary
        True if the module gives one logit z for two classes, which becomes [0, z].
    """

    by_name: bool = False
    field: str | int = LOGITS
    given: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    binary: bool = False

    @property
    def changes_outputs(self) -> bool:
        """True if the outputs that are trained are not those of the module."""
        return self.shape is not None

    def raw(self, module: Any, x: ModuleInputs) -> Tensor:
        """Call a module, and return the tensor that it gives."""
        found = self.result(module, x)
        return found if isinstance(found, Tensor) else self._read(module, found)

    def result(self, module: Any, x: ModuleInputs) -> Any:
        """Call a module, and return what it gives."""
        return module(**x) if self.by_name and isinstance(x, Mapping) else module(x)

    def __call__(self, module: Any, x: ModuleInputs) -> Tensor:
        """Call a module, and return outputs as the task needs them, ``[b, *output_shape]``."""
        found = self.raw(module, x)
        return found if self.shape is None else self.shaped(found)

    def shaped(self, found: Tensor) -> Tensor:
        """Return a module's tensor in the shape that the task needs."""
        assert self.shape is not None
        if not self.binary:
            return found.reshape(len(found), *self.shape)
        z = found.reshape(len(found), 1, *self.shape[1:])
        return torch.cat([torch.zeros_like(z), z], 1)

    def unshaped(self, outputs: Tensor) -> Tensor:
        """Return outputs in the shape in which the module gave them, for its own loss."""
        if self.given is None:
            return outputs
        found = outputs[:, 1] - outputs[:, 0] if self.binary else outputs
        return found.reshape(len(outputs), *self.given)

    def _read(self, module: Any, found: Any) -> Tensor:
        parts, field = _parts(found), self.field
        if isinstance(field, int) and field not in parts:
            field = [*parts, *[field] * (field + 1)][field]  # position of a named part
        chosen = parts.get(field)
        if isinstance(chosen, Tensor):
            return chosen
        of = f"{KEY}: {type(module).__name__}"
        listed = ", ".join(f"{key} ({_said(part)})" for key, part in parts.items())
        if not parts:
            raise ExperimentError(f"{of} must return a tensor of outputs (got a {type(found).__name__})")
        chosen_as = f"model.output is {self.field}" if self.field != LOGITS else f"there is no tensor {LOGITS}"
        raise ExperimentError(
            f"{of} returns a {type(found).__name__} of {listed}, and {chosen_as}. Set `model.output` to the one that "
            "holds the outputs",
            key="model.output",
            found=self.field,
            allowed=[key for key, part in parts.items() if isinstance(part, Tensor)],
        )

    def fitted(self, task: PredictionTask, outputs: int, wanted: tuple[int, ...], found: Tensor) -> ModuleCall | None:
        """Return this call with outputs of a shape that the task needs; None if they cannot have it.

        Parameters
        ----------
        outputs
            K.
        wanted
            Shape of the outputs of one example.
        found
            A module's outputs.
        """
        given = tuple(found.shape[1:])
        if given == wanted:
            return self
        if has_binary_form(task, outputs) and given in (wanted[1:], (1, *wanted[1:])):
            return replace(self, given=given, shape=wanted, binary=True)
        if _without_ones(given) == _without_ones(wanted):
            return replace(self, given=given, shape=wanted)
        return None


AS_IT_IS = ModuleCall()
"""Call with one tensor, whose output is read as it is, or its field ``logits``."""


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without axes of length one at its end."""
    kept = tuple(shape)
    while kept and kept[-1] == 1:
        kept = kept[:-1]
    return kept


def _parts(found: Any) -> dict[str | int, Any]:
    """Return the parts of an output by name or position; empty if it has none."""
    if isinstance(found, Mapping):
        return dict(found)
    if is_dataclass(found):
        return {field.name: getattr(found, field.name) for field in fields(found)}
    if isinstance(found, tuple | list):
        named = dict(zip(getattr(found, "_fields", ()), found, strict=False))
        return {**named, **{i: part for i, part in enumerate(found) if not named}}
    return {}


def _said(part: Any) -> str:
    return str(list(part.shape)) if isinstance(part, Tensor) else type(part).__name__


@cache
def tell_of_binary(name: str) -> None:
    """Log once that a module's one output is taken as the logit of the second class."""
    _log.info("%s gives one output for two classes: z becomes the logits [0, z], whose loss is that of a sigmoid", name)


def call_of(module: nn.Module, x: ModuleInputs, output: str | int | None = None) -> ModuleCall:
    """Return how a module takes such inputs.

    Parameters
    ----------
    output
        Key ``model.output``.

    Raises
    ------
    ExperimentError
        If the inputs are named, and the module takes neither arguments of these names nor a single one.
    """
    field = LOGITS if output is None else output
    if isinstance(x, Tensor):
        return ModuleCall(field=field)
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**x)
    except TypeError as error:
        known = signature.parameters.values()
        if len(known) == 1 and all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in known):
            return ModuleCall(field=field)
        raise ExperimentError(
            f"{KEY}: {type(module).__name__}.forward takes {', '.join(map(str, known)) or 'nothing'}, but an example "
            f"consists of {', '.join(x)} ({error}). Name the inputs as its arguments, or take one dict"
        ) from error
    return ModuleCall(by_name=True, field=field)
