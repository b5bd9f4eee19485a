"""Clipping of a client's answer: all fields from which the server learns, jointly.

If a field is a vector whose change is summed (a field with ``since``), its change from the request is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.algorithms.sums import Summed, learned_fields
from fedloom.messages import Message
from fedloom.privacy.clipped_sum import SLACK, ClippedSum, clip_factor

Values: TypeAlias = Mapping[str, NDArray[np.float64]]
"""Values of summed fields by name, in the shapes of one row."""

BIT = "unclipped"
"""Name of the coordinate that adaptive clipping adds to an update."""


def changes_of(answer: Message, request: Message, fields: Mapping[str, Summed]) -> Values:
    """Return the values to be summed of a one-row answer: its fields, or their changes from the request."""
    found, given = answer.tensors(), request.tensors()
    values = {}
    for name, summed in fields.items():
        value = found[name][0].double()
        values[name] = (value if summed.since is None else value - given[summed.since].double()).numpy()
    return values


def noisy_names(answer: type[Message], fields: Mapping[str, Summed], rule: ClippedSum) -> tuple[str, ...]:
    """Return the names with noise in a sum, in order: the learned fields, and the bit of adaptive clipping."""
    return (*learned_fields(answer, fields), *(() if rule.count_noise is None else (BIT,)))


def norm_of(values: Values, names: tuple[str, ...]) -> float:
    """Return the ℓ2 norm of these fields together."""
    return math.hypot(*(float(np.linalg.norm(values[name].reshape(-1))) for name in names))


def clipped_values(values: Values, names: tuple[str, ...], rule: ClippedSum) -> Values:
    """Return the values with these fields clipped jointly; with adaptive clipping also the coordinate of the bit."""
    norm = norm_of(values, names)
    factor = clip_factor(norm, rule.clip)
    clipped = {name: value * factor if name in names else value for name, value in values.items()}
    return {**clipped, **bit_of(norm <= rule.clip, rule)}


def bit_of(is_below: bool, rule: ClippedSum) -> Values:
    """Return the coordinate that indicates whether an update was clipped, ``[1]``; empty with constant clipping."""
    return {} if rule.count_noise is None else {BIT: np.array([rule.bit_weight * (is_below - 0.5)])}


def clipped_answer(answer: Message, request: Message, fields: Mapping[str, Summed], rule: ClippedSum) -> Message:
    """Return a one-row answer with its learned fields clipped jointly; unchanged if their norm is at most C."""
    names = learned_fields(type(answer), fields)
    norm = norm_of(changes_of(answer, request, fields), names)
    if norm <= rule.clip:
        return answer
    factor, found = clip_factor(norm, rule.clip), answer.tensors()
    for name in names:
        since, value = fields[name].since, found[name]
        if since is None:
            found[name] = value * factor
        else:
            start = request.tensors()[since].double()
            found[name] = (start + (value.double() - start) * factor).to(value.dtype)
    return type(answer)(**found)


def slack_of(answer: Message, request: Message, fields: Mapping[str, Summed], rule: ClippedSum) -> float:
    """Return the error of a clipped answer's norm that rounding to the answer's floating-point type explains."""
    found = SLACK * rule.clip
    for name in learned_fields(type(answer), fields):
        since = fields[name].since
        if since is not None:
            tensor = answer.tensors()[name]
            norm = torch.linalg.vector_norm(request.tensors()[since], dtype=torch.float64)
            found += torch.finfo(tensor.dtype).eps * float(norm)
    return found
