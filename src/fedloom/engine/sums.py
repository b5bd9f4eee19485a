"""Hook of the optional part ``sums``: secure sums, and sums with differential privacy of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from fedloom.core.plugins import capability
from fedloom.data.federated import Normalization
from fedloom.federation.client_side import ClientSide
from fedloom.federation.cohort import Summing
from fedloom.federation.transport import AnswerHolder
from fedloom.messages import Message
from fedloom.privacy.settings import SecureAggregation


class SumsPart(Protocol):
    """Classes and functions of :mod:`fedloom.sums.part`, which documents them."""

    VOCABULARY: Mapping[str, type[Message]]
    Summation: Callable[..., Summing]
    HeldAnswers: Callable[..., AnswerHolder]
    RevealedSums: Callable[[Path | None], object]
    securely_measuring_side: Callable[..., ClientSide]
    securely_measured_normalization: Callable[..., Normalization]
    MomentDigits: type[Message]
    weaker_graph: Callable[[SecureAggregation, int], str | None]


def sums_part() -> SumsPart:
    """Return the part; raise ExperimentError if this installation lacks it."""
    part: SumsPart = capability("sums", "federation.secure_aggregation or privacy of clients")
    return part
