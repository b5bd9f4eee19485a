"""Local: every client trains alone on its own data, from its own random start.

The baseline of J. Scott, H. Zakerinia, C. H. Lampert, PeFLL, ICLR 2024, arXiv 2306.05515, §4. Nothing is shared, so
there are no rounds, and seen and unseen clients do not differ.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from pydantic import Field, model_validator

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Round, Setup, Statistics, conversation
from fedloom.algorithms.client import adapt
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.core.settings import Settings
from fedloom.data.inputs import first
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Replies
from fedloom.models.predictors import Predictors, predictors_of


class LocalServer(base.ServerAlgorithm):
    """Server that only requests local training."""

    def __init__(self, settings: LocalSettings, setup: Setup, generator: torch.Generator) -> None:
        del generator  # clients draw their own starts
        super().__init__(settings, setup)

    def train_round(self, round: Round) -> Statistics:
        """Raise an error, because the method has no rounds.

        Raise ExperimentError always.
        """
        raise ExperimentError(
            f"local has no training rounds (asked for round {round.number}); set federation.rounds to 0"
        )

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Ask each client to train."""
        return cohort.send(LocalTrainRequest())


class LocalClient(base.ClientAlgorithm):
    """Client that runs SGD from its own random start."""

    settings: LocalSettings

    @conversation
    def personalize(self, clients: ClientGroup, opening: LocalTrainRequest) -> Predictors:
        """Train the client's predictor."""
        model, members = self.setup.model, range(len(clients))
        start = torch.stack([model.init(clients.generator(i, "init"), self.setup.dtype) for i in members])
        theta = start.to(first(clients.clients[0].train.x).device)
        return predictors_of(model, personal=adapt(model, clients, theta, self.settings.local, purpose="train"))


class LocalSettings(Settings):
    """Keys of ``algorithm`` for Local."""

    local: LocalSGD = Field(default=LocalSGD(epochs=200), description="training of each client")

    @model_validator(mode="after")
    def _without_rounds(self) -> Self:
        if self.local.schedule is not None:
            raise ValueError("local.schedule: there are no rounds to schedule lr over; leave it out")
        return self

    @property
    def adaptation(self) -> LocalSGD:
        """The whole training."""
        return self.local


class LocalTrainRequest(Message):
    """Opening of personalization, without content."""


class LocalTraining(base.Algorithm):
    """Training of every client alone, without rounds."""

    name = "local"
    no_sums = "has no rounds"
    settings = LocalSettings
    keeps_buffers = True
    server = LocalServer
    client = LocalClient
    messages = (LocalTrainRequest,)
    trains = False
    has_steps = True
    predictors = {"personal": "Local"}
    no_example_privacy = "There are no training rounds, and nothing that is sent depends on training."

    def after_steps(self, settings: Any, steps: int) -> Any:
        """Return settings under which a client makes this many steps in all."""
        return settings.model_copy(update={"local": settings.local.with_steps(steps=steps)})


LOCAL = LocalTraining()
