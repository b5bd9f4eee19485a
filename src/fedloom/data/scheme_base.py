"""Base classes of partition schemes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from fedloom.data.apportion import Mixes, feasible_sizes
from fedloom.data.copies import hold_out
from fedloom.data.reserve import Reserve
from fedloom.data.shift import Shift
from fedloom.data.spec import DataSpec
from fedloom.errors import ExperimentError

ByClass: TypeAlias = Sequence[NDArray[np.int64]]
"""Positions of the examples of each class, C arrays."""

CLIENTS = "Number of clients, seen and unseen."


class SchemeSettings(BaseModel):
    """Base of all schemes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def check(self, classes: int) -> None:
        """Raise ExperimentError if ``classes`` classes cannot satisfy the settings; 0 means data without classes."""
        if classes == 0:
            raise partition_error("scheme", getattr(self, "scheme", None), "needs data with classes", "use means")

    def groups(self, spec: DataSpec) -> int:
        """Return the number of groups of examples that the scheme assigns by: the classes, or one of all examples.

        Raise ExperimentError if the scheme cannot assign examples with such targets.
        """
        return spec.classes if spec.targets is None else 1

    def check_data(self, spec: DataSpec) -> None:
        """Raise ExperimentError if the settings do not fit such data."""
        self.check(self.groups(spec))

    def drawn_spec(self, spec: DataSpec) -> DataSpec:
        """Return the description of the clients' examples, given that of the source."""
        return spec


class ReservingScheme(SchemeSettings):
    """Scheme that can reserve examples for new clients and shift clients' data."""

    reserve: Reserve | None = Field(
        default=None,
        description=(
            "Examples reserved for new clients before the assignment: {share | count, deal} (data.md); null: none."
        ),
    )
    shift: Shift | None = Field(
        default=None,
        description=(
            "Shift of clients' data, by permuted labels or rotated images: {kind, groups} (data.md); null: none."
        ),
    )

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Omit unset keys: this JSON determines the names of partitions."""
        written: dict[str, object] = handler(self)
        for key in ("reserve", "shift", "quantiles"):
            if written.get(key, 0) is None:
                del written[key]
        return written

    def check_data(self, spec: DataSpec) -> None:
        """Reject a shift that the inputs or the task do not allow, too."""
        super().check_data(spec)
        if self.shift is not None:
            self.shift.check(spec)


class MixScheme(ReservingScheme):
    """Scheme that assigns pools of examples by class, with methods to override."""

    clients: int = Field(ge=1, description=CLIENTS)
    quantiles: int | None = Field(
        default=None,
        ge=2,
        description="For regression of one number: assign by this many groups of about equal size, by the quantiles "
        "of the target, as if they were classes; null: by classes.",
    )

    @property
    def by_class(self) -> bool:
        """True if clients differ in their class mixes."""
        return True

    def groups(self, spec: DataSpec) -> int:
        """Return the number of classes, of quantiles of the target, or 1 for a scheme that needs neither."""
        targets = spec.targets
        if self.quantiles is not None and (targets is None or targets.task != "regression" or targets.outputs != 1):
            found = "classes" if targets is None else f"targets of {targets.task} ({targets.outputs} outputs)"
            raise partition_error(
                "quantiles",
                self.quantiles,
                f"is for regression of one number, but the data have {found}",
                "leave it out",
            )
        if targets is None or self.quantiles is not None:
            return self.quantiles or spec.classes
        if self.by_class:
            name = getattr(self, "scheme", None)
            one = targets.task == "regression" and targets.outputs == 1
            remedy = "set data.partition.quantiles, or use natural or iid" if one else "use natural or iid"
            raise partition_error("scheme", name, f"needs classes, and the task is {targets.task}", remedy)
        return 1

    @abstractmethod
    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Return the class mix π_i of every client.

        The train pool has ``available`` [C] examples of each class; ``seen`` [n] marks the clients that train.
        """

    def cap(self, split: str) -> int | None:
        """Return the maximum number of examples of a split per client; None means no limit."""
        return None

    def sizes(
        self, split: str, mixes: Mixes, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int
    ) -> NDArray[np.int64]:
        """Return how many examples each client gets of a split, ``[n]``: as many as its mix and the pool allow."""
        return feasible_sizes(mixes, available, self.cap(split))

    def pools(
        self, train: ByClass, test: ByClass, group: NDArray[np.int64], validation_fraction: float, seed: int
    ) -> Mapping[str, ByClass]:
        """Return the disjoint pools that the three splits are drawn from.

        The test pool is the official test set; ``validation_fraction`` of each class of the official train set is held
        out. Groups of equal inputs, ``[n]``, stay whole (:mod:`fedloom.data.copies`).
        """
        kept, validation = hold_out(train, group, validation_fraction, seed)
        return {"train": kept, "validation": validation, "test": test}


def partition_error(key: str, found: object, fault: str, remedy: str) -> ExperimentError:
    """Return the error of a key under ``data.partition``."""
    value = f"{found:g}" if isinstance(found, float) else f"{found}"
    path = f"data.partition.{key}"
    return ExperimentError(f"{path}: {value} {fault}; {remedy}", key=path, found=found)
