"""Local: every client trains alone, from its own random start, on its own data (papers/001, §4 "Baselines").

There is nothing to share, so there are no rounds; seen and unseen clients differ in nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.base import (
    Algorithm,
    ClientHalf,
    Cohort,
    Conversation,
    Group,
    Round,
    ServerHalf,
    Shapes,
    Statistics,
    Task,
    opened_by,
)
from fedloom.algorithms.training import LocalSGD, local_sgd, predictors_of
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Replies
from fedloom.settings import Settings


@dataclass(frozen=True, eq=False)
class TrainAlone(Message):
    """Opens personalization: nothing is sent but the request."""


class LocalSettings(Settings):
    """Keys of ``algorithm`` for Local."""

    local: LocalSGD = Field(default=LocalSGD(epochs=200), description="the training of each client")


class LocalServer(ServerHalf):
    """Asks and listens."""

    def __init__(self, settings: LocalSettings, task: Task, generator: torch.Generator) -> None:
        del settings, task, generator

    def state(self) -> dict[str, Tensor]:
        """Nothing is shared."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Nothing is shared."""

    def shapes(self) -> Shapes:
        """There are no answers but the metrics."""
        return {}

    def train_round(self, round: Round) -> Statistics:
        """There are no rounds.

        Raises
        ------
        ExperimentError
            Always.
        """
        raise ExperimentError(f"local has no training rounds: found round {round.number}, allowed: federation.rounds 0")

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Ask each client to train."""
        return cohort.send(TrainAlone())


class LocalClient(ClientHalf):
    """SGD from a start of the client's own."""

    def __init__(self, settings: LocalSettings, task: Task) -> None:
        self.settings = settings
        self.task = task

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """All the training there is."""
        del predictor
        return self.settings.local.count(examples)

    @opened_by(TrainAlone)
    def personalize(self, clients: Group, opening: TrainAlone) -> Conversation:
        """Train; the result is the client's predictor."""
        start = torch.stack(
            [self.task.model.init(clients.generator(i, "init"), self.task.dtype) for i in range(len(clients))]
        ).to(clients.clients[0].train.x.device)
        theta, _, _ = local_sgd(self.task.model, start, clients, self.settings.local)
        return predictors_of(self.task.model, personal=theta)
        yield  # a coroutine without an answer of its own


LOCAL = Algorithm(
    name="local",
    version=1,
    settings=LocalSettings,
    server=LocalServer,
    client=LocalClient,
    messages=(TrainAlone,),
    trains=False,
)
