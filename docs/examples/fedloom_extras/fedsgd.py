"""FedSGD: one gradient step on the global model in every round.

B. McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017, §2.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Conversation, Round, Setup, conversation
from fedloom.algorithms.client import LocalTrainer
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.sums import Summed, SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.predictors import Predictors, predictors_of


class FedSGDServer(base.ServerAlgorithm):
    """θ ← θ - η Σ (n_i / n) g_i."""

    def __init__(self, settings: FedSGDSettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        self.state["theta"] = setup.model.init(generator, setup.dtype)

    def train_round(self, round: Round) -> base.Statistics:
        """Make one step with the mean gradient, weighted by examples; lost clients have no weight."""
        replies = round.sample().send(Ask(self.state["theta"]), Gradient)
        step = replies.mean(replies.g, replies.weights)
        self.state["theta"] = self.state["theta"] - self.settings.lr * step
        return {"client_steps": float(replies.present.sum()), "loss": float(replies.mean(replies.loss))}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the global model to every client."""
        return cohort.send(Take(self.state["theta"]))


class FedSGDClient(base.ClientAlgorithm):
    """Computes gradients."""

    predictors = ("personal", "global")

    @conversation
    def train(self, clients: ClientGroup, opening: Ask) -> Conversation:
        """Answer :meth:`FedSGDServer.train_round` with the gradient."""
        local = LocalTrainer(self.setup.model, clients)
        g, loss = local.gradient_at(opening.theta.expand(len(clients), -1), *local.everything())
        yield Gradient(g, loss.double()[:, None])
        return None

    @conversation
    def personalize(self, clients: ClientGroup, opening: Take) -> Predictors:
        """Return the client's predictors; FedLoom evaluates them."""
        theta = opening.theta.expand(len(clients), -1)
        return predictors_of(self.setup.model, personal=theta, **{"global": theta})


class FedSGDSettings(Settings):
    """Keys of ``algorithm`` for FedSGD."""

    lr: float = Field(default=0.1, gt=0, description="step size η")


class Ask(Message):
    """Opening of training: the model at which to compute the gradient."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class Gradient(Message):
    """The gradient of the client's mean loss over its whole train split, and that loss."""

    g: Tensor = rows(Quantity.GRADIENT, "d")  # [c, d]
    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64


class Take(Message):
    """Opens personalization: the model, to be used as it is."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class FedSGD(base.Algorithm):
    """FedSGD, with both halves."""

    name = "fedsgd"
    settings = FedSGDSettings
    server = FedSGDServer
    client = FedSGDClient
    messages = (Ask, Gradient, Take)
    predictors = {"personal": "FedSGD", "global": "FedSGD"}

    def sums(self, settings: FedSGDSettings) -> SummedFields:
        """Return the sum of the gradients by numbers of examples, and that of the losses."""
        return sums_of(Gradient, g=Summed("examples"))


FEDSGD = FedSGD()
