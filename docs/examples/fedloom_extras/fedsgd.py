"""FedSGD: one gradient step on the global model in every round.

B. McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017, §2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

import fedloom.algorithms.base as base
from fedloom.algorithms.base import Cohort, Conversation, Group, Round, Task, opened_by
from fedloom.algorithms.training import labelled, predictors_of
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.settings import Settings


@dataclass(frozen=True, eq=False)
class Ask(Message):
    """Opens training: the model at which a gradient is wanted."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


@dataclass(frozen=True, eq=False)
class Gradient(Message):
    """The gradient of the client's mean loss over its whole train split."""

    g: Tensor = rows(Quantity.GRADIENT)  # [c, d]


@dataclass(frozen=True, eq=False)
class Take(Message):
    """Opens personalization: the model, to be used as it is."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class FedSGDSettings(Settings):
    """Keys of ``algorithm`` for FedSGD."""

    lr: float = Field(default=0.1, gt=0, description="step size η")


class FedSGDServer(base.ServerHalf):
    """θ ← θ - η Σ (n_i / n) g_i."""

    def __init__(self, settings: FedSGDSettings, task: Task, generator: torch.Generator) -> None:
        self.lr = settings.lr
        self.theta = task.model.init(generator, task.dtype)

    def state(self) -> dict[str, Tensor]:
        """The global model: what a checkpoint holds."""
        return {"theta": self.theta}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take a checkpoint over."""
        self.theta = state["theta"]

    def shapes(self) -> base.Shapes:
        """What clients may answer, for each message: the shape of a row."""
        return {Gradient: {"g": tuple(self.theta.shape)}}

    def train_round(self, round: Round) -> base.Statistics:
        """One round. Clients that answered count by their examples; who is lost has no weight."""
        replies = round.sample().send(Ask(self.theta))
        theta = self.theta - self.lr * replies.mean(replies.g, replies.weights)
        if not torch.isfinite(theta).all():
            raise FloatingPointError("the global model is not finite after this step")
        self.theta = theta
        return {"client_steps": float(replies.present.sum())}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Everybody gets the global model."""
        return cohort.send(Take(self.theta))


class FedSGDClient(base.ClientHalf):
    """Computes gradients."""

    predictors = ("personal", "global")

    def __init__(self, settings: FedSGDSettings, task: Task) -> None:
        self.model = task.model

    @opened_by(Ask)
    def train(self, clients: Group, opening: Ask) -> Conversation:
        """The other end of :meth:`FedSGDServer.train_round`: what is yielded is the answer."""
        gradients = []
        for client in clients.clients:
            x, y = labelled(client)
            parameters = self.model.layout.leaves(opening.theta, requires_grad=True)
            loss = F.cross_entropy(self.model.forward(parameters, x), y)
            by_name = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
            gradients.append(self.model.layout.join(by_name))
        yield Gradient(torch.stack(gradients))
        return None

    @opened_by(Take)
    def personalize(self, clients: Group, opening: Take) -> Conversation:
        """What is returned are the client's predictors; FedLoom measures them."""
        theta = opening.theta.expand(len(clients), -1)
        return predictors_of(self.model, personal=theta, **{"global": theta})
        yield  # a coroutine that says nothing


FEDSGD = base.Algorithm(
    name="fedsgd",
    version=1,
    settings=FedSGDSettings,
    server=FedSGDServer,
    client=FedSGDClient,
    messages=(Ask, Gradient, Take),
)
