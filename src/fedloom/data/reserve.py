"""Reserve: examples set aside before anything is assigned, so that new clients have data that no client trained on.

The choice depends only on the data set, not on the seed. All partitions with the same reserve set aside the same
examples, whatever their seed and scheme, and a larger reserve contains a smaller one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedloom.core.keyed import make_rng, shuffled
from fedloom.data.copies import first_groups
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

    def size(self, whole: int, what: str) -> int:
        """Return how many of ``whole`` items, which messages call ``what``, are reserved.

        Raise ExperimentError if a count leaves none.
        """
        if self.count is None:
            assert self.share is not None
            return math.floor(self.share * whole + 0.5)
        if self.count >= whole:
            raise ExperimentError(
                f"data.partition.reserve.count: {self.count} leaves none of the {whole:,} {what}; reserve fewer",
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

    A group of equal inputs (:mod:`fedloom.data.copies`) is reserved as a whole or not at all; ``group`` ``[n]`` is that
    of each example.

    Raise ExperimentError if no example of a class would be left.
    """
    sizes = np.bincount(group, minlength=len(group))
    back = np.zeros(len(group), dtype=np.bool_)
    for c, (of_train, of_test) in enumerate(zip(train, test, strict=True)):
        kept = reserve.size(len(of_train), f"training examples of class {c}")
        of_tests = math.floor(kept / max(len(of_train), 1) * len(of_test) + 0.5)
        for name, members, size in (("train", of_train, kept), ("test", of_test, of_tests)):
            firsts = members[group[members] == members]
            order = firsts[shuffled(make_rng(_SEED, "reserve", name, c), len(firsts))]
            target = math.floor(size * int(sizes[order].sum()) / max(len(members), 1) + 0.5)
            back[order[first_groups(sizes[order], target)]] = True
    given = [[members[back[group[members]] == reserve.deal] for members in pool] for pool in (train, test)]
    every = np.concatenate([*train, *test])
    return given[0], given[1], _named(every[back[group[every]]].tolist())


def reserved_owners(names: Sequence[str], reserve: Reserve) -> tuple[NDArray[np.bool_], Reserved]:
    """Return which owners may become clients, ``[len(names)]`` bool, and the reserve.

    Raise ExperimentError if no owner would be left.
    """
    chosen = np.zeros(len(names), dtype=np.bool_)
    order = shuffled(make_rng(_SEED, "reserve", "owners"), len(names))
    chosen[order[: reserve.size(len(names), "owners")]] = True
    which = [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
    return (chosen if reserve.deal else ~chosen), _named(which)


def _named(which: Sequence[int] | Sequence[str]) -> Reserved:
    text = "\n".join(sorted(str(each) for each in which))
    return Reserved(len(which), hashlib.sha256(text.encode()).hexdigest())
