"""The quantities that aggregator and clients exchange, as typed dataclasses of tensors.

A *quantity* is what a tensor means; the wire contract fixes the list. A *message* is a frozen dataclass, a subclass of
:class:`Message`, whose fields are ``rows`` (one row per client, ``[c, ...]``) or ``broadcast`` (once to each worker)::

    class ModelUpdate(Message):
        delta_theta: Tensor = rows(Quantity.MODEL_UPDATE, "d")  # [c, d]
        steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1]

Any such class can be sent; the transport needs nothing else to encode it. What a client may answer says the shape
of its rows, by numbers and by names that the server half knows (``ServerHalf.sizes``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Generic, Self, TypeAlias, TypeVar, dataclass_transform

import torch
from torch import Tensor


class Quantity(StrEnum):
    """What a tensor on the wire means. The values are the names in ``protos/fedloom/v1``."""

    DESCRIPTOR = "descriptor"
    DESCRIPTOR_UPDATE = "descriptor_update"
    EMBEDDING_NETWORK = "embedding_network"
    EMBEDDING_NETWORK_UPDATE = "embedding_network_update"
    MODEL = "model"
    MODEL_UPDATE = "model_update"
    GAUSSIAN = "gaussian"
    GRADIENT = "gradient"
    LOSS = "loss"
    COUNT = "count"
    METRICS = "metrics"
    OTHER = "other"


COUNT_LIMIT = 1e9
"""Largest count of one client in one answer, such as its SGD steps; a count is a whole number, and none is negative."""

LOSS_LIMIT = 1e40
"""Largest loss of one client, either way: more than float32 can hold, and sums of them stay finite."""

VALUE_LIMIT = 1e12
"""Largest value of a model, a descriptor or a gradient, either way: sums of squares stay finite in float32."""


Shapes: TypeAlias = Mapping[type["Message"], Mapping[str, tuple[int, ...]]]
"""For each message that a client may answer with: the trailing shape of each field (without the row axis)."""


@dataclass(frozen=True)
class MessageField:
    """One field of a message class.

    Attributes
    ----------
    name, quantity
        What it is called, and what it means.
    per_client
        Whether it has one row per client.
    shape
        Of one row, in numbers and names of sizes; empty if a client never answers with it.
    """

    name: str
    quantity: Quantity
    per_client: bool
    shape: tuple[int | str, ...] = ()


def rows(quantity: Quantity, *shape: int | str) -> Any:
    """Declare a field with one row per client: ``[c, *shape]`` where a client answers with it, else ``[c, ...]``."""
    return dataclasses.field(metadata={"quantity": quantity, "per_client": True, "shape": shape})


def broadcast(quantity: Quantity) -> Any:
    """Declare a field that every client of the cohort gets whole, of any shape."""
    return dataclasses.field(metadata={"quantity": quantity, "per_client": False, "shape": ()})


@cache
def fields_of(cls: type[Message]) -> tuple[MessageField, ...]:
    """Return the fields of a message class, in order.

    Raises
    ------
    TypeError
        If a field was declared neither with ``rows`` nor with ``broadcast``.
    """
    found = []
    for field in dataclasses.fields(cls):
        if "quantity" not in field.metadata:
            raise TypeError(f"{cls.__name__}.{field.name} is declared neither with rows() nor with broadcast()")
        found.append(MessageField(field.name, **field.metadata))
    return tuple(found)


def answer_shapes(messages: Sequence[type[Message]], sizes: Mapping[str, int]) -> Shapes:
    """Look up what clients may answer: the messages of which every field says the shape of its rows.

    Parameters
    ----------
    messages
        Of a method, both directions.
    sizes
        The numbers behind the names in shapes, such as d.

    Raises
    ------
    TypeError
        If a shape names a size that is not among them.
    """

    def number(cls: type[Message], field: MessageField, size: int | str) -> int:
        if isinstance(size, str) and size not in sizes:
            raise TypeError(f"{cls.__name__}.{field.name}: found size {size!r}, allowed: {', '.join(sorted(sizes))}")
        return sizes[size] if isinstance(size, str) else size

    return {
        cls: {field.name: tuple(number(cls, field, size) for size in field.shape) for field in cls.fields()}
        for cls in messages
        if cls.fields() and all(field.shape for field in cls.fields())
    }


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(rows, broadcast))
@dataclass(frozen=True, eq=False)
class Message:
    """Base of all messages, which are frozen dataclasses without saying so.

    Tensors are dense, on the CPU when they travel, and never changed in place.
    """

    def __init_subclass__(cls) -> None:
        """Make the subclass a dataclass."""
        dataclass(frozen=True, eq=False)(cls)

    @classmethod
    def fields(cls) -> tuple[MessageField, ...]:
        """Return the fields of this class, in order."""
        return fields_of(cls)  # type: ignore[arg-type]  # mypy: eq=False dataclasses are hashable

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in self.fields()}

    def select(self, index: Sequence[int]) -> Self:
        """Return the message for some of its rows: row fields indexed, broadcasts as they are."""
        if not any(field.per_client for field in self.fields()):
            return self
        span = _as_slice(index)
        picked = {
            field.name: (getattr(self, field.name)[span if span is not None else list(index)])
            if field.per_client
            else getattr(self, field.name)
            for field in self.fields()
        }
        return type(self)(**picked)

    def client_bytes(self) -> int:
        """Bytes of tensor data that one client gets or sends: its row of each row field, each broadcast whole."""
        total = 0
        for field in self.fields():
            tensor: Tensor = getattr(self, field.name)
            whole = tensor.numel() * tensor.element_size()
            total += whole // max(1, tensor.shape[0]) if field.per_client else whole
        return total


M = TypeVar("M", bound=Message, covariant=True)


class Metrics(Message):
    """What a client measured of its predictors; see ``evaluation.measure`` for the axes."""

    counts: Tensor = rows(Quantity.METRICS)  # [c, predictors, splits, readings, 3] float64
    confusion: Tensor = rows(Quantity.METRICS)  # [c, predictors, C, C] int64
    calibration: Tensor = rows(Quantity.METRICS)  # [c, predictors, bins, 3] float64
    uncertainty: Tensor = rows(Quantity.METRICS)  # [c, predictors, 3] float64


class Replies(Generic[M]):
    """The answers of a cohort to one exchange, stacked one row per client in cohort order.

    The fields of the reply are attributes: ``replies.delta_theta`` is ``[c, d]``. The row of a client that did not
    answer is zero and ``present`` is False for it; average with :meth:`mean` or with the weights, never with
    ``.mean(0)``, so that absence is counted right.

    Parameters
    ----------
    message
        The stacked replies, all ``c`` rows; ``None`` when nobody answered.
    present
        ``[c]`` bool: who answered *this* exchange.
    sizes
        ``[c]`` training examples of each client, from the manifest.
    """

    def __init__(self, message: M | None, present: Tensor, sizes: Tensor) -> None:
        self.message = message
        self.present = present
        self.sizes = sizes

    def __getattr__(self, name: str) -> Tensor:
        """Return a field of the reply, ``[c, ...]``."""
        if name.startswith("_") or self.message is None:
            raise AttributeError(name)
        value = getattr(self.message, name)
        if not isinstance(value, Tensor):
            raise AttributeError(name)  # noqa: TRY004 - what __getattr__ must raise
        return value

    def __len__(self) -> int:
        """Number of rows, present or not."""
        return int(self.present.shape[0])

    @property
    def mean_weights(self) -> Tensor:
        """``[c]`` float64: 1/|P| for those present, else 0."""
        present = self.present.double()
        return present / present.sum().clamp(min=1)

    @property
    def weights(self) -> Tensor:
        """``[c]`` float64: n_i / Σ n_j over those present, else 0 (McMahan et al. 2017, Algorithm 1)."""
        sizes = self.present.double() * self.sizes.double()
        return sizes / sizes.sum().clamp(min=1)

    def mean(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Weighted sum over clients in cohort order, ``[c, ...] -> [...]``; uniform over those present by default."""
        weights = self.mean_weights if weights is None else weights
        total = torch.zeros_like(x[0])
        for row, weight in zip(x, weights.tolist(), strict=True):
            if weight:
                total.add_(row, alpha=weight)
        return total

    def total(self, x: Tensor) -> float:
        """Sum of one number per client over those present, ``[c] or [c, 1] -> float``."""
        return float((x.double().reshape(len(self)) * self.present).sum())


def stack(cls: type[M], answers: Sequence[M | None]) -> M | None:
    """Stack one-row answers into one message; the row of a missing answer is zero. ``None`` if all are missing."""
    given = next((answer for answer in answers if answer is not None), None)
    if given is None:
        return None
    stacked = {}
    for field in cls.fields():
        template: Tensor = getattr(given, field.name)
        absent = torch.zeros_like(template)
        stacked[field.name] = _joined([absent if a is None else getattr(a, field.name) for a in answers])
    return cls(**stacked)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first axis: a view if the parts lie one after another in one block, as the wire's do."""
    first = parts[0]
    block = first.untyped_storage().data_ptr()
    for i, part in enumerate(parts):
        if (
            part.data_ptr() != first.data_ptr() + i * first.nbytes
            or part.shape != first.shape
            or part.dtype != first.dtype
            or not part.is_contiguous()
            or part.untyped_storage().data_ptr() != block
        ):
            return torch.cat(list(parts))
    return first.as_strided((len(parts) * first.shape[0], *first.shape[1:]), first.stride())


def _as_slice(index: Sequence[int]) -> slice | None:
    """A contiguous ascending index as a slice, so that selecting it makes a view."""
    first = index[0] if len(index) else 0
    return slice(first, first + len(index)) if list(index) == list(range(first, first + len(index))) else None
