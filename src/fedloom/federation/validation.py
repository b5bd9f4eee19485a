"""Validation of clients' answers: class, fields, quantity, row count, dtype, shape, finiteness, implausible values.

Both carriers share these checks: in process a whole message is checked (:func:`fault`); over the wire the announced
specs are checked before memory is allocated (:func:`mismatch`), and the values when they have arrived. The cohort
refuses values that a quantity cannot have (:func:`absurd`), whatever the carrier.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel

from fedloom.messages import COUNT_LIMIT, LOSS_LIMIT, VALUE_LIMIT, Message, Quantity, Shapes

_ALSO_ALLOWED: Mapping[Quantity, frozenset[torch.dtype]] = {
    # Counts and metrics are sums over examples, in float64 whatever the model's dtype.
    Quantity.METRICS: frozenset({torch.float64, torch.int64}),
    Quantity.COUNT: frozenset({torch.float64}),
    Quantity.LOSS: frozenset({torch.float64}),
    Quantity.OTHER: frozenset({torch.float64, torch.int64, torch.uint8, torch.bool}),
}


@dataclass(frozen=True)
class TensorSpec:
    """One field of a message without its values."""

    name: str
    quantity: Quantity
    per_client: bool
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed values."""
        return math.prod(self.shape) * self.dtype.itemsize


def specs(message: Message) -> tuple[TensorSpec, ...]:
    """Return the specs of a message's fields, in order."""
    return tuple(
        TensorSpec(field.name, field.quantity, field.per_client, tensor.dtype, tuple(tensor.shape))
        for field, tensor in zip(message.fields(), message.tensors().values(), strict=True)
    )


def mismatch(
    cls: type[Message], found: Sequence[TensorSpec], shapes: Shapes, dtype: torch.dtype, rows: int = 1
) -> str | None:
    """Return in one line why a message with these fields is not an allowed answer; None if it is.

    Parameters
    ----------
    cls
        Class of the message.
    found
        Its fields as found; row fields have shape ``[rows, ...]``.
    shapes
        Allowed answers.
    dtype
        Type of the run's floating-point numbers.
    rows
        Number of rows in the message.
    """
    if cls not in shapes:
        allowed = ", ".join(sorted(allowed.__name__ for allowed in shapes))
        return f"{cls.__name__} is not an answer to this exchange (allowed: {allowed})"
    expected = cls.fields()
    if [spec.name for spec in found] != [field.name for field in expected]:
        return f"{cls.__name__} has fields {[s.name for s in found]}, expected {[f.name for f in expected]}"
    for spec, field in zip(found, expected, strict=True):
        where = f"{cls.__name__}.{field.name}"
        if spec.quantity != field.quantity or spec.per_client != field.per_client:
            return f"{where} is a {spec.quantity}, expected a {field.quantity}, {_kind(field.per_client)}"
        allowed_dtypes = {dtype} | _ALSO_ALLOWED.get(field.quantity, frozenset())
        if spec.dtype not in allowed_dtypes:
            return f"{where} has dtype {spec.dtype}, expected {' or '.join(sorted(map(str, allowed_dtypes)))}"
        trailing = tuple(shapes[cls][field.name])
        shape = (rows, *trailing) if field.per_client else trailing
        if spec.shape != shape:
            return f"{where} has shape {_shape(spec.shape)}, expected {_shape(shape)}"
    return None


def non_finite(message: Message) -> str | None:
    """Return a sentence naming the first field that holds a NaN or an infinity; None if all values are finite."""
    for field in message.fields():
        tensor = getattr(message, field.name)
        if tensor.is_floating_point() and not is_finite(tensor):
            return f"{type(message).__name__}.{field.name} ({field.quantity}) is not finite"
    return None


def learning_rates(settings: BaseModel, *, also: Collection[str] = (), where: str = "algorithm") -> dict[str, float]:
    """Return the learning rates of a method by their keys, and the numbers named in ``also``."""
    found: dict[str, float] = {}
    for name in type(settings).model_fields:
        value, key = getattr(settings, name), f"{where}.{name}"
        if isinstance(value, BaseModel):
            found |= learning_rates(value, also=also, where=key)
        elif (name == "lr" or name.endswith("_lr") or name in also) and isinstance(value, float):
            found[key] = value
    return found


def to_lower(rates: Mapping[str, float]) -> str:
    """Return the end of a sentence about training that diverged: ``; lower algorithm.lr (now 1)``, empty of none."""
    lower = " or ".join(f"{key} (now {rate:g})" for key, rate in rates.items())
    return f"; lower {lower}" if lower else ""


def absurd(message: Message, limits: Mapping[str, float], rates: Mapping[str, float] | None = None) -> str | None:
    """Return a sentence naming the first field of a finite answer with a value that its quantity cannot have, or None.

    Counts are whole numbers from 0 to ``COUNT_LIMIT``. The magnitude of losses and unnamed quantities is at most
    ``LOSS_LIMIT``, that of models, updates, gradients and descriptors at most ``VALUE_LIMIT``. Metrics are left to the
    evaluation. ``limits`` are those of a method by field (``ServerAlgorithm.update_bounds``): the largest count, or the
    largest norm. ``rates`` are the method's learning rates (:func:`learning_rates`): if given, values beyond all bounds
    mean that training has diverged.
    """
    for field in message.fields():
        tensor: torch.Tensor = getattr(message, field.name)
        if field.quantity is Quantity.METRICS or not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = (value.item() for value in tensor.aminmax())
        if field.quantity is Quantity.COUNT:
            most = limits.get(field.name, COUNT_LIMIT)
            sensible = low >= 0 and high <= most and bool((tensor == tensor.round()).all())
            allowed = f"whole numbers from 0 to {most:g}"
        else:
            limit = LOSS_LIMIT if field.quantity in (Quantity.LOSS, Quantity.OTHER) else VALUE_LIMIT
            sensible, allowed = -limit <= low and high <= limit, f"at most {limit:g} either way"
        if not sensible:
            where = f"{type(message).__name__}.{field.name} ({field.quantity}) has values from {low:g} to {high:g}"
            if field.quantity is Quantity.COUNT or rates is None:
                return f"{where}, allowed: {allowed}"
            steps = getattr(message, "steps", None)
            when = "" if steps is None else f" in {steps.sum().item():g} local steps"
            return f"training diverged{when}: {where}, beyond ±{limit:g}{to_lower(rates)}"
        if field.quantity is not Quantity.COUNT and field.name in limits:
            norm, largest = float(tensor.norm()), limits[field.name]
            if not norm <= largest:
                where = f"{type(message).__name__}.{field.name} ({field.quantity})"
                return f"{where} has norm {norm:g}, allowed: {largest:g}"
    return None


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is a NaN or an infinity."""
    # A sum costs a quarter of the check. If it is finite, so are all values; otherwise it may have overflowed.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def fault(message: Message, shapes: Shapes, dtype: torch.dtype) -> str | None:
    """Return in one line why a one-row answer cannot be used; None if it can.

    Parameters
    ----------
    message
        The answer of one client: row fields have shape ``[1, ...]``.
    shapes
        Allowed answers: message class -> field -> trailing shape.
    dtype
        Type of the run's floating-point numbers. Counts and metrics may always be float64.
    """
    return mismatch(type(message), specs(message), shapes, dtype) or non_finite(message)


def _kind(per_client: bool) -> str:
    return "one row per client" if per_client else "broadcast"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
