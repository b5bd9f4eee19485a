"""Validation of clients' answers: class, fields, quantity, row count, dtype, shape, finiteness, implausible values.

Both transports share these checks: in process a whole message is checked (:func:`fault`); over the wire the announced
specs are checked before memory is allocated (:func:`mismatch`), and the values when they have arrived. The cohort
refuses values that a quantity cannot have (:func:`out_of_range`), whatever the transport.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import BaseModel

from fedloom.errors import FedloomError, raised_at
from fedloom.messages import COUNT_LIMIT, LOSS_LIMIT, VALUE_LIMIT, Message, MessageField, Quantity, Shapes

_ALSO_ALLOWED: Mapping[Quantity, frozenset[torch.dtype]] = {
    # Counts and metrics are sums over examples, in float64 whatever the model's dtype.
    Quantity.METRICS: frozenset({torch.float64, torch.int64}),
    Quantity.COUNT: frozenset({torch.float64}),
    Quantity.LOSS: frozenset({torch.float64}),
    Quantity.OTHER: frozenset({torch.float64, torch.int64, torch.uint8, torch.bool}),
}


_SINGULAR = (torch.linalg.LinAlgError, np.linalg.LinAlgError)  # type: ignore[attr-defined]  # not exported by torch

_OF_A_CLIENT = (FedloomError, FloatingPointError, OverflowError, *_SINGULAR)


class TensorSpec(NamedTuple):
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
    cls: type[Message], specs_received: Sequence[TensorSpec], shapes: Shapes, dtype: torch.dtype, rows: int = 1
) -> str | None:
    """Return one line on why a message with these fields is not an allowed answer; None if it is allowed.

    Parameters
    ----------
    cls, specs_received
        Class of the message, and its fields as found; row fields have shape ``[rows, ...]``.
    shapes
        Allowed answers.
    dtype
        Type of the run's floating-point numbers.
    """
    if cls not in shapes:
        return f"{cls.__name__} is not an answer to this exchange, {_either(other.__name__ for other in shapes)} is"
    expected = cls.fields()
    if [spec.name for spec in specs_received] != [field.name for field in expected]:
        return f"{cls.__name__} has fields {[s.name for s in specs_received]}, expected {[f.name for f in expected]}"
    wrong = (
        _field_mismatch(s, f, shapes[cls][f.name], dtype, rows) for s, f in zip(specs_received, expected, strict=True)
    )
    return next((f"{cls.__name__}.{reason}" for reason in wrong if reason is not None), None)


def _field_mismatch(
    spec: TensorSpec, field: MessageField, trailing_shape: Sequence[int], dtype: torch.dtype, rows: int
) -> str | None:
    if spec.quantity != field.quantity or spec.per_client != field.per_client:
        kind = "one row per client" if field.per_client else "broadcast"
        return f"{field.name} is a {spec.quantity}, expected a {field.quantity}, {kind}"
    dtypes = {dtype} | _ALSO_ALLOWED.get(field.quantity, frozenset())
    if spec.dtype not in dtypes:
        return f"{field.name} has dtype {spec.dtype}, expected {_either(map(str, dtypes))}"
    shape = (rows, *trailing_shape) if field.per_client else tuple(trailing_shape)
    return None if spec.shape == shape else f"{field.name} has shape {list(spec.shape)}, expected {list(shape)}"


def _either(names: Iterable[str]) -> str:
    return " or ".join(sorted(names))


def non_finite(message: Message) -> str | None:
    """Return a sentence naming the first field that holds a NaN or an infinity; None if all values are finite."""
    for field in message.fields():
        tensor = getattr(message, field.name)
        if tensor.is_floating_point() and not is_finite(tensor):
            return f"{type(message).__name__}.{field.name} ({field.quantity}) is not finite"
    return None


def learning_rates(settings: BaseModel, *, also: Collection[str] = (), prefix: str = "algorithm") -> dict[str, float]:
    """Return the learning rates of a method by their keys, and the numbers named in ``also``."""
    rates: dict[str, float] = {}
    for name in type(settings).model_fields:
        value, key = getattr(settings, name), f"{prefix}.{name}"
        if isinstance(value, BaseModel):
            rates |= learning_rates(value, also=also, prefix=key)
        elif (name == "lr" or name.endswith("_lr") or name in also) and isinstance(value, float):
            rates[key] = value
    return rates


def to_lower(rates: Mapping[str, float]) -> str:
    """Return a hint for diverged training: ``; lower algorithm.lr (now 1)``, empty without learning rates."""
    lower = " or ".join(f"{key} (now {rate:g})" for key, rate in rates.items())
    return f"; lower {lower}" if lower else ""


def out_of_range(
    message: Message,
    limits: Mapping[str, float],
    rates: Mapping[str, float] | None = None,
    *,
    scaled: Collection[str] = (),
) -> str | None:
    """Return a sentence naming the first field of a finite answer with a value that its quantity cannot have, or None.

    Counts are whole numbers from 0 to ``COUNT_LIMIT``. The magnitude of losses and unnamed quantities is at most
    ``LOSS_LIMIT``, that of models, updates, gradients and descriptors at most ``VALUE_LIMIT``. Metrics are left to the
    evaluation. ``limits`` are those of a method by field (``ServerAlgorithm.update_bounds``): the largest count, or the
    largest norm. ``rates`` are the method's learning rates (:func:`learning_rates`): if given, values beyond all bounds
    mean that training has diverged. Counts named in ``scaled`` may have been clipped, and need not be whole.
    """
    for field in message.fields():
        tensor: torch.Tensor = getattr(message, field.name)
        if field.quantity is Quantity.METRICS or not tensor.is_floating_point() or not tensor.numel():
            continue
        label, bound = f"{type(message).__name__}.{field.name} ({field.quantity})", limits.get(field.name)
        if field.quantity is Quantity.COUNT:
            wrong = _wrong_count(tensor, COUNT_LIMIT if bound is None else bound, whole=field.name not in scaled)
        else:
            limit = LOSS_LIMIT if field.quantity in (Quantity.LOSS, Quantity.OTHER) else VALUE_LIMIT
            if (wrong := _beyond(tensor, limit)) is not None and rates is not None:
                return f"{_diverged(message)}: {label} {wrong}{to_lower(rates)}"
            if wrong is None and bound is not None and not (norm := float(tensor.norm())) <= bound:
                wrong = f"has norm {norm:g}, more than {bound:g}"
        if wrong is not None:
            return f"{label} {wrong}"
    return None


def _wrong_count(tensor: torch.Tensor, most: float, *, whole: bool) -> str | None:
    low, high = (value.item() for value in tensor.aminmax())
    if low >= 0 and high <= most and (not whole or bool((tensor == tensor.round()).all())):
        return None
    return f"must hold {'whole ' if whole else ''}numbers from 0 to {most:g}, and has values from {low:g} to {high:g}"


def _beyond(tensor: torch.Tensor, limit: float) -> str | None:
    low, high = (value.item() for value in tensor.aminmax())
    return None if -limit <= low and high <= limit else f"has values from {low:g} to {high:g}, beyond ±{limit:g}"


def _diverged(message: Message) -> str:
    steps = getattr(message, "steps", None)
    return "training diverged" + ("" if steps is None else f" in {steps.sum().item():g} local steps")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is a NaN or an infinity."""
    # A sum costs a quarter of the check. If it is finite, so are all values; otherwise it may have overflowed.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def fault(message: Message, shapes: Shapes, dtype: torch.dtype) -> str | None:
    """Return one line on why a one-row answer is unusable; None if it is usable.

    Row fields have shape ``[1, ...]``; ``shapes`` maps allowed classes to fields to trailing shapes. ``dtype`` is that
    of the run's floating-point numbers; counts and metrics may always be float64.
    """
    return mismatch(type(message), specs(message), shapes, dtype) or non_finite(message)


def is_bug(error: Exception) -> bool:
    """Return True if an exception is not caused by the client for which it was raised."""
    return not isinstance(error, _OF_A_CLIENT)


def place(error: Exception) -> str:
    """Return the line of a bug, ``my_method.py, line 12``, without the folder."""
    location = raised_at(error)
    return "unknown line" if location is None else f"{Path(location.filename).name}, line {location.lineno}"


def safe_reason(error: Exception) -> str:
    """Return the error text that is sent to the aggregator: FedLoom's own sentence, or the class and the line of code.

    Other exceptions may quote what they read; their class and line reveal nothing about the data.
    """
    text = str(error).splitlines()
    if isinstance(error, FloatingPointError | FedloomError) and text:
        return text[0][:300]
    return f"{type(error).__name__} ({place(error)})"
