"""Base classes of partition schemes, and their options: a reserve for new clients, and shifted data."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from fedloom.core.keyed import make_rng, shuffled
from fedloom.data.apportion import Mixes, feasible_sizes, first_groups, hold_out
from fedloom.data.spec import DataSpec
from fedloom.errors import ExperimentError

_SEED = 0
"""Seed of the reserve's order: not the experiment's, so that all experiments reserve the same examples."""


class Reserve(BaseModel):
    """Size of the reserve, and whether clients get the reserved examples or the others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float | None = Field(
        default=None, gt=0, lt=1, description="Fraction of each class (natural: of the owners) to reserve."
    )
    count: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Number of official training examples of each class (natural: owners) to reserve, with the same fraction "
            "of its test examples; set exactly one of share and count."
        ),
    )
    deal: bool = Field(
        default=False,
        description="Assign the reserved examples instead of the others: for clients that are new to a run.",
    )

    @model_validator(mode="after")
    def _one_size(self) -> Reserve:
        if (self.share is None) == (self.count is None):
            raise ValueError(f"give exactly one of share and count (share is {self.share}, count is {self.count})")
        return self

    def size(self, whole: int, group: str) -> int:
        """Return how many of ``whole`` items, which messages call ``group``, are reserved.

        Raise ExperimentError if a count leaves none.
        """
        if self.count is None:
            assert self.share is not None
            return math.floor(self.share * whole + 0.5)
        if self.count >= whole:
            raise ExperimentError(
                f"data.partition.reserve.count: {self.count} leaves none of the {whole:,} {group}; reserve fewer",
                key="data.partition.reserve.count",
                found=self.count,
            )
        return self.count


@dataclass(frozen=True)
class Reserved:
    """Number of reserved examples (natural: owners) of a partition, and the SHA-256 of their identities, hex.

    They are equal for partitions with the same reserve.
    """

    examples: int
    sha256: str


def reserved_classes(
    train: Sequence[NDArray[np.int64]],
    test: Sequence[NDArray[np.int64]],
    reserve: Reserve,
    group: NDArray[np.int64],
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]], Reserved]:
    """Return the positions of each class available to clients, for train and for test, and the reserve.

    A group of equal inputs (:mod:`fedloom.data.apportion`) is reserved as a whole or not at all; ``group`` ``[n]`` is
    that of each example.

    Raise ExperimentError if no example of a class would be left.
    """
    sizes = np.bincount(group, minlength=len(group))
    back = np.zeros(len(group), dtype=np.bool_)
    for c, (of_train, of_test) in enumerate(zip(train, test, strict=True)):
        count = reserve.size(len(of_train), f"training examples of class {c}")
        of_tests = math.floor(count / max(len(of_train), 1) * len(of_test) + 0.5)
        for name, members, size in (("train", of_train, count), ("test", of_test, of_tests)):
            firsts = members[group[members] == members]
            order = firsts[shuffled(make_rng(_SEED, "reserve", name, c), len(firsts))]
            target = math.floor(size * int(sizes[order].sum()) / max(len(members), 1) + 0.5)
            back[order[first_groups(sizes[order], target)]] = True
    divided = [[members[back[group[members]] == reserve.deal] for members in pool] for pool in (train, test)]
    every = np.concatenate([*train, *test])
    return divided[0], divided[1], _named(every[back[group[every]]].tolist())


def reserved_owners(names: Sequence[str], reserve: Reserve) -> tuple[NDArray[np.bool_], Reserved]:
    """Return which owners may become clients, ``[len(names)]`` bool, and the reserve.

    Raise ExperimentError if no owner would be left.
    """
    is_reserved = np.zeros(len(names), dtype=np.bool_)
    order = shuffled(make_rng(_SEED, "reserve", "owners"), len(names))
    is_reserved[order[: reserve.size(len(names), "owners")]] = True
    names_reserved = [name for name, is_chosen in zip(names, is_reserved, strict=True) if is_chosen]
    return (is_reserved if reserve.deal else ~is_reserved), _named(names_reserved)


def _named(members: Sequence[int] | Sequence[str]) -> Reserved:
    text = "\n".join(sorted(str(each) for each in members))
    return Reserved(len(members), hashlib.sha256(text.encode()).hexdigest())


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
        if self.kind == "labels" and spec.targets is not None:
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
        document: dict[str, object] = handler(self)
        for key in ("reserve", "shift", "quantiles"):
            if document.get(key, 0) is None:
                del document[key]
        return document

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
        if self.quantiles is not None and (targets is None or not targets.kind.is_number or targets.outputs != 1):
            targets_found = "classes" if targets is None else f"targets of {targets.task} ({targets.outputs} outputs)"
            raise partition_error(
                "quantiles",
                self.quantiles,
                f"is for regression of one number, but the data have {targets_found}",
                "leave it out",
            )
        if targets is None or self.quantiles is not None:
            return self.quantiles or spec.classes
        if self.by_class:
            name = getattr(self, "scheme", None)
            one = targets.kind.is_number and targets.outputs == 1
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
        """Return the number of examples of a split for each client, ``[n]``, limited by its mix and the pool."""
        return feasible_sizes(mixes, available, self.cap(split))

    def pools(
        self, train: ByClass, test: ByClass, group: NDArray[np.int64], validation_fraction: float, seed: int
    ) -> Mapping[str, ByClass]:
        """Return the disjoint pools that the three splits are drawn from.

        The test pool is the official test set; ``validation_fraction`` of each class of the official train set is held
        out. Groups of equal inputs, ``[n]``, stay whole (:mod:`fedloom.data.apportion`).
        """
        train_left, validation = hold_out(train, group, validation_fraction, seed)
        return {"train": train_left, "validation": validation, "test": test}


def partition_error(key: str, found: object, fault: str, remedy: str) -> ExperimentError:
    """Return the error of a key under ``data.partition``."""
    value = f"{found:g}" if isinstance(found, float) else f"{found}"
    path = f"data.partition.{key}"
    return ExperimentError(f"{path}: {value} {fault}; {remedy}", key=path, found=found)
