"""Partition schemes: which mix of classes each client gets, as settings and as the draw itself.

A scheme draws one row π_i per client: the fractions of its examples that come from each class. The same π_i rules
the client's train, validation and test split (``fedloom.data.partition``), so that they match.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedloom.data.keyed import keyed_generator, shuffled
from fedloom.errors import ExperimentError

Mixes: TypeAlias = NDArray[np.float64]
"""``[n, C]``; rows sum to one."""


class _Scheme(BaseModel):
    """What all schemes share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clients: int = Field(ge=1, description="Number of clients, seen and unseen.")
    train_per_client: int | None = Field(
        default=None, ge=1, description="At most this many training examples per client; the class mix stays."
    )
    test_per_client: int | None = Field(
        default=None, ge=1, description="At most this many test examples per client; the class mix stays."
    )

    def check(self, classes: int) -> None:
        """Refuse settings that cannot be met with ``classes`` classes.

        Raises
        ------
        ExperimentError
            Naming the key, what was found and what is allowed.
        """


class ClassesScheme(_Scheme):
    """Each client has examples of a few classes only (the pathological split of McMahan et al. 2017)."""

    scheme: Literal["classes"] = "classes"
    classes_per_client: int = Field(ge=1, description="k: how many distinct classes each client has.")
    shares: tuple[float, ...] | None = Field(
        default=None,
        description="The fractions of a client's examples that come from its k classes; null: equal. They sum to 1.",
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> ClassesScheme:
        if self.shares is not None:
            if len(self.shares) != self.classes_per_client:
                raise ValueError(
                    f"shares: found {len(self.shares)} numbers; allowed: one for each of the "
                    f"{self.classes_per_client} classes of a client (classes_per_client)"
                )
            if not all(0 < share <= 1 for share in self.shares):
                raise ValueError(f"shares: found {list(self.shares)}; allowed: numbers above 0 and at most 1")
            if not math.isclose(math.fsum(self.shares), 1, abs_tol=1e-6):
                raise ValueError(f"shares: found numbers that sum to {math.fsum(self.shares):g}; allowed: a sum of 1")
        if self.train_per_client is not None and self.train_per_client < self.classes_per_client:
            raise ValueError(
                f"train_per_client: found {self.train_per_client}; allowed: at least classes_per_client "
                f"({self.classes_per_client}), so that a client has an example of each of its classes"
            )
        return self

    def check(self, classes: int) -> None:
        """Refuse more classes per client than there are."""
        if self.classes_per_client > classes:
            raise ExperimentError(
                f"data.partition.classes_per_client: found {self.classes_per_client}; "
                f"allowed: 1 to {classes}, the number of classes of the data set"
            )

    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Deal k distinct classes to each client and give them their shares, in the order drawn."""
        held = deal_classes(self.clients, len(available), self.classes_per_client, seed)
        shares = np.asarray(self.shares or [1.0] * self.classes_per_client)
        mixes = np.zeros((self.clients, len(available)))
        np.put_along_axis(mixes, held, np.broadcast_to(shares / shares.sum(), held.shape), axis=1)
        return mixes


class DirichletScheme(_Scheme):
    """Each client's class mix is drawn from a Dirichlet (papers/001 §4, Analysis of Client Descriptors)."""

    scheme: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(ge=1e-3, le=1e6, description="α of the clients (of the seen ones, if alpha_unseen is given).")
    alpha_unseen: float | None = Field(
        default=None, ge=1e-3, le=1e6, description="α of the unseen clients (papers/001 Fig. 4); null: alpha."
    )

    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Draw π_i ~ Dir(α, ..., α) for each client from a generator of its own.

        So a seen client's π_i depends neither on ``alpha_unseen`` nor on the number of clients.
        """
        unseen = self.alpha if self.alpha_unseen is None else self.alpha_unseen
        return np.stack(
            [
                keyed_generator(seed, "mix", client).dirichlet([self.alpha if is_seen else unseen] * len(available))
                for client, is_seen in enumerate(seen)
            ]
        )


class IidScheme(_Scheme):
    """Every client has the class mix of the whole data set."""

    scheme: Literal["iid"] = "iid"

    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Give every client the same mix."""
        return np.tile(available / available.sum(), (self.clients, 1))


Scheme: TypeAlias = Annotated[ClassesScheme | DirichletScheme | IidScheme, Field(discriminator="scheme")]
"""Any scheme, told apart by its key ``scheme``."""


def unseen_count(clients: int, unseen_fraction: float) -> int:
    """Number of unseen clients: the fraction rounded to the nearest, halves up, so that at least one is seen."""
    return min(math.floor(clients * unseen_fraction + 0.5), clients - 1)


def deal_classes(clients: int, classes: int, per_client: int, seed: int) -> NDArray[np.int64]:
    """Deal k distinct classes to every client, each class as often as any other (±1); ``[n, k]``, in the order drawn.

    Each of the C classes gets ⌊nk/C⌋ or ⌈nk/C⌉ places, at random where they are not equal. Clients choose in
    random order. With R clients still to choose, a class that has R places left must go to every one of them; the
    rest are drawn at random, in proportion to the places left. Then no class has more than R - 1 places left for the
    R - 1 clients that remain and the places add up to k(R - 1): so there are always k distinct classes to choose from,
    and the deal ends, whatever the seed.
    """
    generator = keyed_generator(seed, "classes")
    places = np.full(classes, clients * per_client // classes)
    places[shuffled(generator, classes)[: clients * per_client % classes]] += 1
    held = np.empty((clients, per_client), dtype=np.int64)
    for chosen, client in enumerate(shuffled(generator, clients)):
        picked = [int(c) for c in np.flatnonzero(places == clients - chosen)]
        free = places.copy()
        free[picked] = 0
        while len(picked) < per_client:
            drawn = int(np.searchsorted(np.cumsum(free), int(generator.random() * free.sum()), side="right"))
            picked.append(drawn)
            free[drawn] = 0
        # Mixed, so that a share is not tied to the classes that had to be taken.
        held[client] = np.asarray(picked)[shuffled(generator, per_client)]
        places[picked] -= 1
    return held
