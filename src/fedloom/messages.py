"""Messages between aggregator and clients, as typed dataclasses of tensors.

A *quantity* is the meaning of a tensor; the wire contract fixes the list. A *message* is a frozen dataclass, a subclass
of :class:`Message`, whose fields are ``rows`` (one row per client, ``[c, ...]``) or ``broadcast`` (once per worker)::

    class ModelUpdate(Message):
        delta_theta: Tensor = rows(Quantity.MODEL_UPDATE, "d")  # [c, d]
        steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1]

The transport encodes any such class without further declarations. A message that clients send declares the shape of
its rows, in numbers and in names that the server algorithm defines (``ServerAlgorithm.sizes``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar, dataclass_transform

import torch
from torch import Tensor

from fedloom.core.memory import spooled


class Quantity(StrEnum):
    """Meaning of a tensor on the wire. The values are the names in ``protos/fedloom/v1``."""

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
"""Largest count that one client may report in one answer, such as SGD steps; counts are whole and nonnegative."""

LOSS_LIMIT = 1e40
"""Largest absolute loss of one client: more than float32 can hold, and small enough that sums stay finite."""

VALUE_LIMIT = 1e12
"""Largest absolute value in a model, descriptor or gradient: sums of squares stay finite in float32."""


Shapes: TypeAlias = Mapping[type["Message"], Mapping[str, tuple[int, ...]]]
"""For each message that a client may send, the trailing shape of each field (without the row axis)."""


@dataclass(frozen=True)
class MessageField:
    """Field of a message class."""

    name: str
    quantity: Quantity
    per_client: bool
    """True if the field has one row per client."""
    shape: tuple[int | str, ...] = ()
    """Shape of one row, in numbers and names of sizes; empty if clients never send the field."""


def rows(quantity: Quantity, *shape: int | str) -> Any:
    """Declare a field with one row per client: ``[c, *shape]`` if clients send it, else ``[c, ...]``."""
    return dataclasses.field(metadata={"quantity": quantity, "per_client": True, "shape": shape})


def broadcast(quantity: Quantity) -> Any:
    """Declare a field of any shape that every client of the cohort receives whole."""
    return dataclasses.field(metadata={"quantity": quantity, "per_client": False, "shape": ()})


def answer_shapes(messages: Sequence[type[Message]], sizes: Mapping[str, int]) -> Shapes:
    """Return the row shapes of the messages that clients may send: those whose fields all declare one.

    Parameters
    ----------
    messages
        Messages of a method, in both directions.
    sizes
        Values of the names in shapes, such as d.

    Raises
    ------
    TypeError
        If a shape names an unknown size.
    """

    def number(cls: type[Message], field: MessageField, size: int | str) -> int:
        if isinstance(size, str) and size not in sizes:
            raise TypeError(f"{cls.__name__}.{field.name} has size {size!r}; use one of {', '.join(sorted(sizes))}")
        return sizes[size] if isinstance(size, str) else size

    return {
        cls: {field.name: tuple(number(cls, field, size) for size in field.shape) for field in cls.fields()}
        for cls in messages
        if cls.fields() and all(field.shape for field in cls.fields())
    }


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(rows, broadcast))
@dataclass(frozen=True, eq=False)
class Message:
    """Base of all messages; subclasses become frozen dataclasses automatically.

    Tensors are dense, on the CPU when they are sent, and never modified in place.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False)(cls)

    @classmethod
    @cache
    def fields(cls) -> tuple[MessageField, ...]:
        """Return the fields of this class, in order.

        Raise TypeError if a field was declared with neither ``rows`` nor ``broadcast``.
        """
        for field in dataclasses.fields(cls):
            if "quantity" not in field.metadata:
                raise TypeError(f"{cls.__name__}.{field.name} is declared neither with rows() nor with broadcast()")
        return tuple(MessageField(field.name, **field.metadata) for field in dataclasses.fields(cls))

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by name."""
        return dict(vars(self))

    def select(self, index: Sequence[int]) -> Self:
        """Return the message for a subset of its rows: row fields indexed, broadcasts unchanged."""
        picked: Any = _as_slice(index) or list(index)
        tensors = self.tensors()
        rows = {field.name: tensors[field.name] for field in self.fields() if field.per_client}
        if all(picked == slice(0, tensor.shape[0]) for tensor in rows.values()):
            return self
        return type(self)(**(tensors | {name: tensor[picked] for name, tensor in rows.items()}))

    def split(self, count: int) -> list[Self]:
        """Return the message of each of ``count`` rows: what :meth:`select` returns for it."""
        named = zip(self.fields(), vars(self).values(), strict=True)
        fields = [tensor.split(1) if field.per_client else (tensor,) * count for field, tensor in named]
        return [type(self)(*row) for row in zip(*fields, strict=True)] if fields else [self] * count

    def client_bytes(self) -> int:
        """Return the bytes of tensor data per client: its row of each row field, and each broadcast whole."""
        return sum(
            tensor.nbytes // (max(1, tensor.shape[0]) if field.per_client else 1)
            for field, tensor in zip(self.fields(), vars(self).values(), strict=True)
        )


M = TypeVar("M", bound=Message, covariant=True)


class Metrics(Message):
    """A client's measurements of its predictors; see ``evaluation.measure`` for the axes."""

    counts: Tensor = rows(Quantity.METRICS)  # [c, predictors, splits, readings, 3] float64
    confusion: Tensor = rows(Quantity.METRICS)  # [c, predictors, C, C] int64
    calibration: Tensor = rows(Quantity.METRICS)  # [c, predictors, bins, 3] float64
    uncertainty: Tensor = rows(Quantity.METRICS)  # [c, predictors, 3] float64
    sums: Tensor = rows(Quantity.METRICS)  # [c, predictors, splits, K] float64
    models: Tensor = rows(Quantity.METRICS)  # [c, 1 + SKETCH] float64, see ``evaluation.spread``; or [c, 0]


class SummedMetrics(Message):
    """Measurements known only in sums over clients, with the moments of each client's own metrics."""

    counts: Tensor = rows(Quantity.METRICS)
    confusion: Tensor = rows(Quantity.METRICS)
    calibration: Tensor = rows(Quantity.METRICS)
    uncertainty: Tensor = rows(Quantity.METRICS)
    sums: Tensor = rows(Quantity.METRICS)
    moments: Tensor = rows(Quantity.OTHER)  # [c, predictors, readings, 2 + metrics, 3] float64


class Replies(Generic[M]):
    """Answers of a cohort to one exchange, stacked with one row per client in cohort order.

    The fields of the reply are attributes: ``replies.delta_theta`` is ``[c, d]``. For a client that did not answer, the
    row is zero and ``present`` is False. To exclude absent clients correctly, average with :meth:`mean` or with the
    weights, never with ``.mean(0)``.

    Parameters
    ----------
    message
        Stacked replies, all ``c`` rows; ``None`` if no client answered.
    present
        ``[c]`` bool: clients that answered this exchange.
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
            raise AttributeError(name)  # noqa: TRY004 - __getattr__ must raise this class
        return value

    def __len__(self) -> int:
        return int(self.present.shape[0])

    @property
    def is_noisy(self) -> bool:
        """True if sums have noise that makes them private, so that they are rarely 0, and may have the wrong sign."""
        return False

    @property
    def mean_weights(self) -> Tensor:
        """``[c]`` float64: 1/|P| for present clients, else 0."""
        present = self.present.double()
        return present / present.sum().clamp(min=1)

    @property
    def weights(self) -> Tensor:
        """``[c]`` float64: n_i / Σ n_j over present clients, else 0 (McMahan et al. 2017, Algorithm 1)."""
        sizes = self.present.double() * self.sizes.double()
        return sizes / sizes.sum().clamp(min=1)

    @property
    def count(self) -> float:
        """Number of clients that a mean divides by: the present ones."""
        return int(self.present.sum())

    def mean(self, x: Tensor, weights: Tensor | None = None, *, since: Tensor | None = None) -> Tensor:
        """Return the weighted sum over clients in cohort order, ``[c, ...] -> [...]``; by default their mean.

        With ``since`` ``[...]``, that of the changes from it.
        """
        weights = self.mean_weights if weights is None else weights
        x = x if since is None else x - since
        total = torch.zeros_like(x[0])
        for row, weight in zip(x, weights.tolist(), strict=True):
            if weight:
                total.add_(row, alpha=weight)
        return total

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over present clients in cohort order, ``[c, ...] -> [...]``."""
        return self.mean(x, self.present.double())

    def total(self, x: Tensor) -> float:
        """Return the sum of one number per client over present clients, ``[c] or [c, 1] -> float``."""
        return float((x.double().reshape(len(self)) * self.present).sum())

    def each(self, x: Tensor) -> Tensor | None:
        """Return the rows of present clients ``[p, ...]``; None if the server knows only sums."""
        return x[self.present]


Weighting: TypeAlias = Literal["examples", "uniform"]
"""Weights of clients in a sum: their numbers of training examples, or 1 each."""


@dataclass(frozen=True)
class FieldSum:
    """Sum of one field over the clients of a cohort."""

    value: Tensor
    """Weighted sum, shaped like a row; the sum of changes if the field is a change from a broadcast."""
    weight: float
    """Sum of the weights, by which a mean divides."""
    weighting: Weighting


class Sums(Replies[M]):
    """Answers of a cohort, known only in sums over the present clients.

    A field is a :class:`FieldSum`, not a tensor of rows, so :meth:`mean`, :meth:`sum` and :meth:`total` are all that
    a server can ask for, with the weights that the method has declared (``Algorithm.sums``).

    Parameters
    ----------
    sums
        The sum of each field.
    present, sizes
        As in :class:`Replies`.
    count
        Number of clients by which a plain mean divides.
    is_noisy
        True for noisy sums.
    """

    def __init__(
        self, sums: Mapping[str, FieldSum], present: Tensor, sizes: Tensor, count: float, *, is_noisy: bool = False
    ) -> None:
        super().__init__(None, present, sizes)
        self._sums = dict(sums)
        self._count = count
        self._is_noisy = is_noisy

    def __getattr__(self, name: str) -> Any:
        """Return the sum of a field."""
        if name.startswith("_") or name not in self._sums:
            raise AttributeError(name)
        return self._sums[name]

    @property
    def count(self) -> float:
        """Number of clients by which a plain mean divides; under differential privacy, the expected one."""
        return self._count

    @property
    def is_noisy(self) -> bool:
        """True if the sums have noise."""
        return self._is_noisy

    def mean(self, x: Any, weights: Tensor | None = None, *, since: Tensor | None = None) -> Tensor:
        """Return the mean of a field by the weights that the method has declared; NaN if no client has answered.

        A noisy sum of updates is divided by the expected weight, so its mean is never NaN.

        Raise ValueError if ``weights`` differ from the declared ones.
        """
        del since  # already subtracted by the clients
        used: Tensor = self.mean_weights if weights is None else weights
        declared = self.weights if x.weighting == "examples" else self.mean_weights
        if not torch.equal(used, declared):
            raise ValueError(f"this sum is weighted by {x.weighting} only; see Algorithm.sums")
        mean: Tensor = x.value / x.weight
        return mean

    def sum(self, x: Any) -> Tensor:
        """Return the plain sum of a field."""
        if x.weighting != "uniform":
            raise ValueError("this sum is weighted by examples; see Algorithm.sums")
        total: Tensor = x.value
        return total

    def total(self, x: Any) -> float:
        """Return the plain sum of a number."""
        return float(self.sum(x))

    def each(self, x: Any) -> None:
        """Return None: no client's own row is known."""


def stack(cls: type[M], answers: Sequence[M | None]) -> M | None:
    """Stack one-row answers into one message, with zero rows for missing ones; ``None`` if all are missing."""
    given = next((answer for answer in answers if answer is not None), None)
    if given is None:
        return None
    absent = {name: tensor.new_zeros(()).expand_as(tensor) for name, tensor in given.tensors().items()}
    rows = [absent if answer is None else answer.tensors() for answer in answers]
    return cls(**{name: _joined([row[name] for row in rows]) for name in absent})


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first axis, as a view if the parts are adjacent in one block, as on the wire."""
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
            file = spooled(len(parts) * first.nbytes)
            out = None if file is None else torch.frombuffer(file, dtype=first.dtype).view(-1, *first.shape[1:])
            return torch.cat(list(parts), out=out)
    return first.as_strided((len(parts) * first.shape[0], *first.shape[1:]), first.stride())


def _as_slice(index: Sequence[int]) -> slice | None:
    """Return a contiguous ascending index as a slice, which selects a view; None for any other index."""
    first = index[0] if len(index) else 0
    return slice(first, first + len(index)) if list(index) == list(range(first, first + len(index))) else None
