"""Settings that apply to every conversation of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedloom.federation.private_sums import PrivateSums
from fedloom.federation.releases import Releases
from fedloom.federation.states import Versions
from fedloom.federation.summation import Summation
from fedloom.messages import Message
from fedloom.privacy.accounting import Release


@dataclass(frozen=True)
class RoundConfig:
    """Settings that apply to every conversation of a run."""

    seed: int
    clients_per_round: int
    deadline_s: float
    min_replies: int
    shapes: Mapping[type[Message], Mapping[str, tuple[int, ...]]]
    stop: threading.Event
    judge: Callable[[str, Message], str | None]
    """Returns why the values of a client's well-formed answer are implausible; None if they are plausible."""
    states: Callable[[Sequence[str]], tuple[Versions, ...]] | None = None
    """Returns the versions that clients start from now, for methods with client states."""
    releases: Releases | None = None
    """Record of private answers, updated before they are requested."""
    summation: Summation | None = None
    """Answers of which only sums are made; None if every answer is used as it is."""
    sums_metrics: bool = False
    """True if the clients' metrics are summed securely."""
    noisy_steps: Callable[[str, str], Mapping[Release, int]] | None = None
    """Returns the releases of a client's noisy steps in a conversation of a purpose, for privacy of examples."""
    private: PrivateSums | None = None
    """Draws and noise of training, if clients are private."""
