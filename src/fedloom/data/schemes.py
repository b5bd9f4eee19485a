"""Partition schemes: how a data set is divided among clients, as settings and as code that draws the partition.

Six schemes assign examples to clients by class. Such a scheme defines one row π_i per client, the fractions of its
examples that come from each class; the shared rule of ``fedloom.data.assignment`` does the rest. A scheme may also set
client sizes (``imbalanced``) or the examples in the pools (``fixed``). The seventh scheme, ``natural``, follows the
known owners of the examples (``fedloom.data.natural``). The last, ``means``, draws the examples themselves
(``fedloom.data.assignment``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedloom.core.keyed import make_rng, shuffled
from fedloom.data.apportion import Mixes, fill_pools, partition_classes
from fedloom.data.manifest import SPLITS
from fedloom.data.scheme_base import CLIENTS, ByClass, MixScheme, ReservingScheme, SchemeSettings, partition_error
from fedloom.data.spec import DataSpec

_TRAIN_CAP = "Maximum number of training examples per client; the class mix is kept."
FEWER = "fewer examples per class, fewer clients or fewer labels_per_client"
_TEST_CAP = "Maximum number of test examples per client; the class mix is kept."


class _CappedScheme(MixScheme):
    """Scheme whose clients are as large as their mixes allow, up to a cap."""

    train_per_client: int | None = Field(default=None, ge=1, description=_TRAIN_CAP)
    test_per_client: int | None = Field(default=None, ge=1, description=_TEST_CAP)

    def cap(self, split: str) -> int | None:
        """Return the cap of the train or test split; None for validation."""
        return {"train": self.train_per_client, "validation": None, "test": self.test_per_client}[split]


class ClassesScheme(_CappedScheme):
    """Examples of only a few classes for each client (the pathological split of McMahan et al. 2017)."""

    scheme: Literal["classes"] = "classes"
    classes_per_client: int = Field(ge=1, description="k, the number of distinct classes of each client.")
    shares: tuple[float, ...] | None = Field(
        default=None,
        description="Fractions of a client's examples from its k classes, which sum to 1; null: equal.",
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> ClassesScheme:
        if self.shares is not None:
            if len(self.shares) != self.classes_per_client:
                raise ValueError(
                    f"shares: there are {len(self.shares)} numbers; give one for each of a client's "
                    f"{self.classes_per_client} classes (classes_per_client)"
                )
            if not all(0 < share <= 1 for share in self.shares):
                raise ValueError(f"shares: {list(self.shares)} must be numbers above 0 and at most 1")
            if not math.isclose(math.fsum(self.shares), 1, abs_tol=1e-6):
                raise ValueError(f"shares: the sum of the numbers is {math.fsum(self.shares):g}; it must be 1")
        if self.train_per_client is not None and self.train_per_client < self.classes_per_client:
            raise ValueError(
                f"train_per_client: {self.train_per_client} is below classes_per_client ({self.classes_per_client}); a "
                "client needs an example of each of its classes"
            )
        return self

    def check(self, classes: int) -> None:
        """Reject more classes per client than the data set has."""
        super().check(classes)
        _check_classes("classes_per_client", self.classes_per_client, classes)

    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Give each client k distinct classes with their shares, in the order drawn."""
        classes_held = partition_classes(self.clients, len(available), self.classes_per_client, seed)
        shares = np.asarray(self.shares or [1.0] * self.classes_per_client)
        return _shared_out(classes_held, len(available), shares / shares.sum())


class DirichletScheme(_CappedScheme):
    """Class mix of each client drawn from a Dirichlet distribution (papers/001 §4, Analysis of Client Descriptors)."""

    scheme: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(ge=1e-3, le=1e6, description="α of the clients (of the seen ones, if alpha_unseen is given).")
    alpha_unseen: float | None = Field(
        default=None, ge=1e-3, le=1e6, description="α of the unseen clients (papers/001 Fig. 4); null: alpha."
    )

    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Draw π_i ~ Dir(α, ..., α) for each client from its own generator.

        A seen client's π_i therefore depends neither on ``alpha_unseen`` nor on the number of clients.
        """
        unseen = self.alpha if self.alpha_unseen is None else self.alpha_unseen
        return np.stack(
            [
                make_rng(seed, "mix", client).dirichlet([self.alpha if is_seen else unseen] * len(available))
                for client, is_seen in enumerate(seen)
            ]
        )


class IidScheme(_CappedScheme):
    """Class mix of the whole data set for every client."""

    scheme: Literal["iid"] = "iid"

    @property
    def by_class(self) -> bool:
        """False, since all clients have the same mix."""
        return False

    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Give every client the same mix."""
        return np.tile(available / available.sum(), (self.clients, 1))


class DominantScheme(_CappedScheme):
    """Share ρ of class i for client i, and (1 - ρ)/(C - 1) of each other class (papers/002 §5.2)."""

    scheme: Literal["dominant"] = "dominant"
    rho: float = Field(le=1, description="ρ, the fraction of a client's examples from its dominant class.")

    def check(self, classes: int) -> None:
        """Reject a ρ with which the class would not dominate."""
        super().check(classes)
        _check_dominant("rho", self.rho, classes)

    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Give client i a share ρ of class i mod C."""
        return _dominant(self.clients, len(available), self.rho)


class ImbalancedScheme(MixScheme):
    """Many training examples for a few clients and few for all others (papers/002 §5.1: one has 5000, nine have 20).

    Only train splits differ in size. Every client gets an equal share of the validation and test pools, in its own mix,
    so that small clients are measured as accurately as large ones.
    """

    scheme: Literal["imbalanced"] = "imbalanced"
    large_clients: int = Field(default=1, ge=1, description="Number of large clients, at least one of which is seen.")
    large_size: int = Field(default=5000, ge=1, description="Number of training examples of a large client.")
    small_size: int = Field(
        default=20, ge=1, description="Number of training examples of each client that is not large."
    )
    dominant_share: float | None = Field(
        default=None,
        le=1,
        description=(
            "Fraction of one class in each client (client i: class i mod C); the other classes share the rest evenly."
        ),
    )
    classes_per_client: int | None = Field(
        default=None,
        ge=1,
        description="Distinct classes of each client, in equal shares. If this and dominant_share are null, every "
        "client has the mix of the whole data set.",
    )
    test_per_client: int | None = Field(default=None, ge=1, description=_TEST_CAP)

    @property
    def by_class(self) -> bool:
        """True if clients have a dominant class, or a few classes."""
        return self.dominant_share is not None or self.classes_per_client is not None

    @model_validator(mode="after")
    def _check_keys(self) -> ImbalancedScheme:
        if self.large_clients > self.clients:
            raise ValueError(f"large_clients: {self.large_clients} is more than clients ({self.clients})")
        if self.small_size > self.large_size:
            raise ValueError(f"small_size: {self.small_size} is more than large_size ({self.large_size})")
        if self.dominant_share is not None and self.classes_per_client is not None:
            raise ValueError(
                f"dominant_share: {self.dominant_share:g} cannot be combined with classes_per_client "
                f"{self.classes_per_client}; set one of the two to null"
            )
        if self.classes_per_client is not None and self.small_size < self.classes_per_client:
            raise ValueError(
                f"small_size: {self.small_size} is below classes_per_client ({self.classes_per_client}), and a client "
                "needs an example of each of its classes"
            )
        return self

    def check(self, classes: int) -> None:
        """Reject a share with which no class would dominate, or more classes per client than the data set has."""
        super().check(classes)
        if self.dominant_share is not None:
            _check_dominant("dominant_share", self.dominant_share, classes)
        if self.classes_per_client is not None:
            _check_classes("classes_per_client", self.classes_per_client, classes)

    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Give every client the mix of the whole data set, one dominant class, or a few classes."""
        if self.dominant_share is not None:
            return _dominant(self.clients, len(available), self.dominant_share)
        if self.classes_per_client is not None:
            classes_held = partition_classes(self.clients, len(available), self.classes_per_client, seed)
            return _shared_out(
                classes_held, len(available), np.full(self.classes_per_client, 1 / self.classes_per_client)
            )
        return np.tile(available / available.sum(), (self.clients, 1))

    def cap(self, split: str) -> int | None:
        """Return the cap of the test split."""
        return self.test_per_client if split == "test" else None

    def sizes(
        self, split: str, mixes: Mixes, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int
    ) -> NDArray[np.int64]:
        """Return the configured sizes for the train split, and the largest possible sizes for the others.

        Raise ExperimentError if there are too few training examples, in total or of one class.
        """
        if split != "train":
            return super().sizes(split, mixes, available, seen, seed)
        size = np.where(self._large(seen, seed), self.large_size, self.small_size)
        smaller = f"with small_size {self.small_size}, use smaller or fewer clients"
        if size.sum() > available.sum():
            fault = (
                f"needs {size.sum():,} training examples for {self.clients} clients, but there are {available.sum():,}"
            )
            raise partition_error("large_size", self.large_size, fault, smaller)
        demand = size @ mixes
        c = int((demand - available).argmax())
        if demand[c] > available[c] + 1e-6:
            fault = (
                f"needs {math.ceil(demand[c] - 1e-6):,} training examples of class {c}, but there are {available[c]:,}"
            )
            raise partition_error("large_size", self.large_size, fault, f"{smaller}, or more even mixes")
        return size

    def _large(self, seen: NDArray[np.bool_], seed: int) -> NDArray[np.bool_]:
        """Draw the large clients: the first among the seen clients, the others among all.

        Without a large client among the seen ones, training would never meet the imbalance that the scheme is for.
        """
        order = shuffled(make_rng(seed, "large"), self.clients)
        first = order[seen[order]][:1]
        others = order[order != first]
        large = np.zeros(self.clients, dtype=np.bool_)
        large[np.concatenate([first, others])[: self.large_clients]] = True
        return large


class FixedScheme(MixScheme):
    """Fixed numbers of examples of a few labels, from the joined official sets (papers/003 §5: small to large)."""

    scheme: Literal["fixed"] = "fixed"
    train_per_class: int = Field(ge=1, description="Number of training examples per label of a client.")
    test_per_class: int = Field(ge=1, description="Number of test examples per label of a client.")
    labels_per_client: int = Field(ge=1, description="Number of distinct labels of each client.")
    validation_from: Literal["rest", "train"] = Field(
        default="rest",
        description=(
            "Source of the validation examples (validation_fraction * train_per_class of each label, at least 1): "
            "unused examples, or the training examples."
        ),
    )

    def check(self, classes: int) -> None:
        """Reject more labels per client than the data set has."""
        super().check(classes)
        _check_classes("labels_per_client", self.labels_per_client, classes)

    def mixes(self, available: NDArray[np.int64], seen: NDArray[np.bool_], seed: int) -> Mixes:
        """Give every client equal shares of its labels."""
        classes_held = partition_classes(self.clients, len(available), self.labels_per_client, seed)
        return _shared_out(classes_held, len(available), np.full(self.labels_per_client, 1 / self.labels_per_client))

    def pools(
        self, train: ByClass, test: ByClass, group: NDArray[np.int64], validation_fraction: float, seed: int
    ) -> Mapping[str, ByClass]:
        """Return pools, from the joined official sets, with exactly the examples that the holders of each class need.

        With p_c = h_c m, where h_c clients hold class c, the shared rule gives each client k m examples, m of each
        label. Raise ExperimentError if a class runs out.
        """
        validation = max(1, math.floor(self.train_per_class * validation_fraction + 0.5))
        train_count = self.train_per_class - (validation if self.validation_from == "train" else 0)
        if train_count < 1:
            fault = (
                f"leaves no training example of a label besides {validation} for validation (validation_from: train)"
            )
            remedy = "use more, or a smaller data.validation_fraction"
            raise partition_error("train_per_class", self.train_per_class, fault, remedy)
        per_client = np.array([train_count, validation, self.test_per_class])
        classes_held = partition_classes(self.clients, len(train), self.labels_per_client, seed)
        holders = np.bincount(classes_held.reshape(-1), minlength=len(train))
        per_class = [np.concatenate(both) for both in zip(train, test, strict=True)]
        short = holders * per_client.sum() - np.array([len(members) for members in per_class])
        if short.max() > 0:
            c = int(short.argmax())
            fault = (
                f"needs {holders[c] * per_client.sum():,} examples of class {c}, but there are {len(per_class[c]):,}: "
                f"{holders[c]} clients hold it, each with {train_count} training, {validation} validation, "
                f"{self.test_per_class} test examples"
            )
            remedy = f"use validation_from: train, a smaller data.validation_fraction, or {FEWER}"
            raise partition_error("train_per_class", self.train_per_class, fault, remedy)
        members_by_class = [
            members[shuffled(make_rng(seed, "fixed", c), len(members))] for c, members in enumerate(per_class)
        ]
        demand = holders[:, None] * per_client
        pools = dict(zip(SPLITS, fill_pools(members_by_class, demand, group), strict=True))
        for place, (split, pool) in enumerate(pools.items()):
            short = next((c for c, part in enumerate(pool) if len(part) < demand[c, place]), None)
            if short is not None:
                fault = (
                    f"needs {demand[short, place]:,} {split} examples of class {short}, but there are "
                    f"{len(pool[short]):,}, because equal inputs stay in one split"
                )
                raise partition_error("train_per_class", self.train_per_class, fault, f"use {FEWER}")
        return pools


class NaturalScheme(ReservingScheme):
    """One client per owner (a writer, a speaker, a role of a play), with splits of the owner's examples."""

    scheme: Literal["natural"] = "natural"
    clients: int | None = Field(
        default=None,
        ge=1,
        description="Number of qualifying owners that become clients, seen and unseen, drawn at random; null: all.",
    )
    min_examples: int = Field(default=10, ge=3, description="Minimum number of an owner's examples, over all splits.")
    test_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Fraction of each owner's examples for testing; null: the data set's own split, or 0.2 if it has "
        "none.",
    )
    train_per_client: int | None = Field(default=None, ge=1, description=_TRAIN_CAP)
    test_per_client: int | None = Field(default=None, ge=1, description=_TEST_CAP)


class MeansScheme(SchemeSettings):
    """Examples drawn for each client around its own mean: the data of the noisy quadratic model (papers/004, §6).

    User 0 is the first seen client. Its mean m_0 lies at ``distance`` from 0, where the quadratic model starts. The
    mean of every other client lies at ``bias`` from m_0 in a common direction, plus ``spread`` in a direction of its
    own.
    """

    scheme: Literal["means"] = "means"
    clients: int = Field(ge=1, description=CLIENTS)
    dimension: int = Field(default=1, ge=1, description="Number of features of an example.")
    bias: float = Field(
        default=1.0, ge=0, description="Distance from user 0's mean to the center of the other clients' means."
    )
    spread: float = Field(
        default=0.0, ge=0, description="Distance from the center of the other clients' means to each of these means."
    )
    distance: float = Field(default=1.0, ge=0, description="Distance of user 0's mean from 0.")
    noise: float = Field(default=1.0, ge=0, description="Standard deviation of each feature of an example.")
    train_per_client: int = Field(
        default=1000, ge=2, description="Number of training and validation examples of each client."
    )
    test_per_client: int = Field(default=200, ge=1, description="Number of test examples of each client.")

    def drawn_spec(self, spec: DataSpec) -> DataSpec:
        """Return the description of the examples drawn."""
        return DataSpec.single("features", (self.dimension,))

    def check(self, classes: int) -> None:
        """Reject a data set that already has examples."""
        if classes:
            others = "classes, dirichlet, dominant, imbalanced, fixed, natural or iid"
            fault = "draws its own examples, and the data set has some"
            raise partition_error("scheme", "means", fault, f"use dataset gaussian with it, or {others}")


Scheme: TypeAlias = Annotated[
    ClassesScheme
    | DirichletScheme
    | DominantScheme
    | ImbalancedScheme
    | FixedScheme
    | NaturalScheme
    | IidScheme
    | MeansScheme,
    Field(discriminator="scheme"),
]
"""Union of all schemes, discriminated by the key ``scheme``."""


def unseen_count(clients: int, held_out_fraction: float) -> int:
    """Return the number of unseen clients: the fraction, rounded half up, but always leaving one seen client."""
    return min(math.floor(clients * held_out_fraction + 0.5), clients - 1)


def _shared_out(classes_held: NDArray[np.int64], classes: int, shares: NDArray[np.float64]) -> Mixes:
    """Return the mixes of clients that have ``shares`` [k] of the classes they hold [n, k]."""
    mixes = np.zeros((len(classes_held), classes))
    np.put_along_axis(mixes, classes_held, np.broadcast_to(shares, classes_held.shape), axis=1)
    return mixes


def _dominant(clients: int, classes: int, share: float) -> Mixes:
    """Return mixes in which client i has ``share`` of class i mod C, and equal shares of all other classes."""
    mixes = np.full((clients, classes), (1 - share) / max(classes - 1, 1))
    mixes[np.arange(clients), np.arange(clients) % classes] = share
    return mixes


def _check_dominant(key: str, share: float, classes: int) -> None:
    if share < (1 - 1e-9) / classes:
        fault = f"is below 1/{classes}, so the class would not dominate"
        raise partition_error(key, share, fault, f"set it to {1 / classes:g} or more, at most 1")


def _check_classes(key: str, per_client: int, classes: int) -> None:
    if per_client > classes:
        raise partition_error(
            key, per_client, "exceeds the number of classes of the data set", f"set it to {classes} or less"
        )
