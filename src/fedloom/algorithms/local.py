"""Local: every client trains alone, from its own random start, on its own data.

The baseline of J. Scott, H. Zakerinia, C. H. Lampert, PeFLL, ICLR 2024, arXiv 2306.05515, §4. There is nothing to
share, so there are no rounds; seen and unseen clients differ in nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Group, Round, Statistics, conversation
from fedloom.algorithms.client import LocalSGD, train
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Replies
from fedloom.models.predictors import Predictors, predictors_of
from fedloom.settings import Settings


class LocalServer(base.ServerHalf):
    """Asks and listens."""

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


class LocalClient(base.ClientHalf):
    """SGD from a start of the client's own."""

    @conversation
    def personalize(self, clients: Group, opening: TrainAlone) -> Predictors:
        """Train; the result is the client's predictor."""
        model, members = self.task.model, range(len(clients))
        start = torch.stack([model.init(clients.generator(i, "init"), self.task.dtype) for i in members])
        theta = start.to(clients.clients[0].train.x.device)
        if self.settings.local.steps != 0:  # 0: as it starts (``evaluation.own_steps``)
            theta = train(model, clients, theta, self.settings.local).theta
        return predictors_of(model, personal=theta)

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """All the training there is."""
        count: int = self.settings.local.count(examples)
        return count


class LocalSettings(Settings):
    """Keys of ``algorithm`` for Local."""

    local: LocalSGD = Field(default=LocalSGD(epochs=200), description="the training of each client")


class TrainAlone(Message):
    """Opens personalization: nothing is sent but the request."""


LOCAL = base.Algorithm(
    name="local",
    version=1,
    settings=LocalSettings,
    server=lambda settings, task, generator: LocalServer(settings, task),
    client=LocalClient,
    messages=(TrainAlone,),
    trains=False,
    needs_classes=False,
    titles=lambda settings: {"personal": "Local"},
    stepping=lambda settings, k: settings.model_copy(update={"local": settings.local.lasting(steps=k)}),
)
