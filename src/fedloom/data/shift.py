"""Distribution shift between groups of clients: permuted labels or rotated images.

A shift does not change which examples a client gets, only their labels or orientation. The permutation and rotation of
a group depend on neither the seed nor the data, so that clients of another partition belong to the same groups.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedloom.core.keyed import make_rng, shuffled
from fedloom.data.spec import DataSpec
from fedloom.errors import ExperimentError

_SEED = 0
"""Seed of the groups' permutations: not the experiment's, so that they are the same for all experiments."""

TURNS = 4

X: TypeAlias = NDArray[Any]


class Shift(BaseModel):
    """Shift of clients' data beyond their class mix."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["labels", "rotation"] = Field(
        description=(
            "labels: permute the labels of a client's examples (concept shift). rotation: rotate its images (feature "
            "shift)."
        )
    )
    groups: int | None = Field(
        default=None,
        ge=2,
        description=(
            "Number of equal random groups of clients, each with its own permutation (the first keeps the data set's "
            "labels), or rotation: 2 of 0 and 180 degrees, or 4 of 0, 90, 180 and 270. Null: with labels, a "
            "permutation per client."
        ),
    )

    @model_validator(mode="after")
    def _check_rotation(self) -> Shift:
        if self.kind == "rotation" and self.groups not in (2, TURNS):
            raise ValueError(f"groups: {self.groups} cannot be rotated evenly; with kind rotation set 2 or {TURNS}")
        return self

    def check(self, spec: DataSpec) -> None:
        """Raise ExperimentError if inputs cannot be rotated, or labels permuted; it names the key."""
        fault, kind, shape, task = None, spec.kind, spec.input_shape, spec.task
        if self.kind == "labels" and task != "classification":
            fault = f"kind: labels permutes classes, but the task is {task}; use rotation, or null"
        elif self.kind == "labels" and kind == "tokens":
            fault = "kind: labels of tokens are the next tokens, which cannot be permuted; use pixels or features"
        elif self.kind == "rotation" and kind != "pixels":
            fault = f"kind: rotation needs images, but the inputs are {kind}"
        elif self.kind == "rotation" and self.groups == TURNS and shape[-1] != shape[-2]:
            fault = f"groups: {self.groups} needs square images, but these are {shape[-2]}x{shape[-1]}; set 2"
        if fault is not None:
            raise ExperimentError(f"data.partition.shift.{fault}")

    def deal(self, clients: int, seed: int) -> tuple[int, ...]:
        """Return the group of each client; without groups, each client is its own group."""
        if self.groups is None:
            return tuple(range(clients))
        dealt = shuffled(make_rng(seed, "shift"), clients) % self.groups
        return tuple(int(group) for group in dealt)

    def shifted(self, x: X, y: NDArray[Any], group: int, classes: int, seed: int) -> tuple[X, NDArray[Any]]:
        """Return a client's inputs and targets after the shift; masks are rotated with their images.

        The seed is that of the partition.
        """
        if self.kind == "rotation":
            return self._turned(x, group), self._turned(y, group) if y.ndim == 3 else y
        return x, self.permutation(group, classes, seed)[y]

    def undone(self, x: X, y: NDArray[Any], group: int, classes: int, seed: int) -> tuple[X, NDArray[Any]]:
        """Return a client's examples before the shift: the inverse of :meth:`shifted`."""
        if self.kind == "rotation":
            return self._turned(x, -group), self._turned(y, -group) if y.ndim == 3 else y
        return x, np.argsort(self.permutation(group, classes, seed))[y]

    def permutation(self, group: int, classes: int, seed: int) -> NDArray[np.int64]:
        """Return the label that a group uses for each label of the data set, ``[C]``."""
        if self.groups is None:
            return shuffled(make_rng(seed, "shift", "client", group), classes)
        return shuffled(make_rng(_SEED, "shift", group), classes) if group else np.arange(classes)

    def _turned(self, x: NDArray[Any], group: int) -> NDArray[Any]:
        assert self.groups is not None, "checked: rotation has groups"
        return np.ascontiguousarray(np.rot90(x, group * (TURNS // self.groups), axes=(-2, -1)))
