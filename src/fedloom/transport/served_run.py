"""Description of the run that an aggregator serves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from fedloom.federation.roster import AvailableClients
from fedloom.messages import Message


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """Run that an aggregator serves.

    Attributes
    ----------
    name, incarnation
        The run, and the id of this aggregator process; replies to another one are refused.
    experiment
        The shared part of the experiment, as JSON; sent to every worker in its Welcome.
    algorithm, version
        Algorithm and version that a worker must have to be admitted.
    vocabulary
        Message classes allowed in replies, by class name.
    dtype
        Type of the run's floating-point numbers.
    clients
        Ids of all clients of the run, seen and unseen. A worker that names any other client is refused.
    roster
        Clients that train; an observer may not answer for them.
    presence
        Record of connected clients, in a federation whose clients have their own data, and join and leave; None in any
        other federation.
    classes
        Number of classes C, where ``presence`` is given.
    """

    name: str
    incarnation: str
    experiment: str
    algorithm: str
    version: int
    vocabulary: Mapping[str, type[Message]]
    dtype: torch.dtype
    clients: Collection[str]
    roster: Collection[str] = ()
    presence: AvailableClients | None = None
    classes: int = 0
