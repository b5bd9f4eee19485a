"""Federated averaging, personalized by local steps.

B. McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017,
Algorithm 1. The global model is always reported; each client's own predictor is the global model after 0 or more
local SGD steps on its train split (fine-tuning).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.settings import Settings


@dataclass(frozen=True, eq=False)
class GlobalModel(Message):
    """Opens training: the shared model."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


@dataclass(frozen=True, eq=False)
class ModelUpdate(Message):
    """What local training did."""

    delta_theta: Tensor = rows(Quantity.MODEL_UPDATE)  # [c, d]
    steps: Tensor = rows(Quantity.COUNT)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS)  # [c, 1] float64


@dataclass(frozen=True, eq=False)
class FineTune(Message):
    """Opens personalization: the shared model."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class FedAvgSettings(Settings):
    """Keys of ``algorithm`` for FedAvg."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="local training in a round")
    personalize_steps: int = Field(
        default=0, ge=0, description="local SGD steps by which a client makes the global model its own (0: none)"
    )
    server_lr: float = Field(default=1.0, gt=0, description="factor on the average update")
    weighting: Literal["examples", "uniform"] = Field(
        default="examples", description="average by n_i (the paper) or uniformly"
    )


class FedAvgServer(ServerHalf):
    """θ ← θ + lr Σ (n_i / n) Δθ_i over the clients that answered."""

    def __init__(self, settings: FedAvgSettings, task: Task, generator: torch.Generator) -> None:
        self.settings = settings
        self.theta = task.model.init(generator, task.dtype)

    def state(self) -> dict[str, Tensor]:
        """The global model."""
        return {"theta": self.theta}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over the global model."""
        self.theta = state["theta"]

    def shapes(self) -> Shapes:
        """Updates of the size of θ."""
        return {ModelUpdate: {"delta_theta": tuple(self.theta.shape), "steps": (1,), "loss": (1,)}}

    def train_round(self, round: Round) -> Statistics:
        """One round of Algorithm 1."""
        cohort = round.sample()
        updates = cohort.send(GlobalModel(self.theta))
        weights = updates.weights if self.settings.weighting == "examples" else updates.mean_weights
        theta = self.theta + self.settings.server_lr * updates.mean(updates.delta_theta, weights)
        if not torch.isfinite(theta).all():
            raise FloatingPointError("the global model is not finite after this update")
        self.theta = theta
        return {
            "client_steps": updates.total(updates.steps),
            "loss": float(updates.mean(updates.loss)),
        }

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the global model; the client fine-tunes it."""
        return cohort.send(FineTune(self.theta))


class FedAvgClient(ClientHalf):
    """Local SGD from the global model."""

    predictors = ("personal", "global")

    def __init__(self, settings: FedAvgSettings, task: Task) -> None:
        self.settings = settings
        self.task = task

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """``personalize_steps`` for ``personal``."""
        del examples
        return self.settings.personalize_steps if predictor == "personal" else 0

    @opened_by(GlobalModel)
    def train(self, clients: Group, opening: GlobalModel) -> Conversation:
        """ClientUpdate of Algorithm 1."""
        start = opening.theta.expand(len(clients), -1)
        theta, steps, loss = local_sgd(self.task.model, start, clients, self.settings.local)
        yield ModelUpdate(theta - start, steps, loss)
        return None

    @opened_by(FineTune)
    def personalize(self, clients: Group, opening: FineTune) -> Conversation:
        """``personal`` is the global model after ``personalize_steps`` steps, ``global`` before."""
        start = opening.theta.expand(len(clients), -1)
        theta = start
        if self.settings.personalize_steps:
            tuning = self.settings.local.model_copy(update={"steps": self.settings.personalize_steps, "epochs": None})
            theta, _, _ = local_sgd(self.task.model, start, clients, tuning, "fine-tune")
        return predictors_of(self.task.model, personal=theta, **{"global": start})
        yield  # a coroutine without an answer of its own


FEDAVG = Algorithm(
    name="fedavg",
    version=1,
    settings=FedAvgSettings,
    server=FedAvgServer,
    client=FedAvgClient,
    messages=(GlobalModel, ModelUpdate, FineTune),
)
