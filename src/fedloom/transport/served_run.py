"""Description of the run that an aggregator serves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from fedloom.federation.roster import AvailableClients
from fedloom.messages import Message


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """Run that an aggregator serves."""

    name: str
    incarnation: str
    """Id of this aggregator process; replies to another one are refused."""
    experiment: str
    """Shared part of the experiment, as JSON; sent to every worker in its Welcome."""
    algorithm: str
    version: int
    """Version of the algorithm that a worker must have to be admitted."""
    vocabulary: Mapping[str, type[Message]]
    """Message classes allowed in replies, by class name."""
    dtype: torch.dtype
    """Type of the run's floating-point numbers."""
    clients: Collection[str]
    """Ids of all clients of the run, seen and unseen. A worker that names any other client is refused."""
    roster: Collection[str] = ()
    """Clients that train; an observer may not answer for them."""
    presence: AvailableClients | None = None
    """Record of connected clients in an open federation; None in any other."""
    classes: int = 0
    """Number of classes C, where ``presence`` is given."""
