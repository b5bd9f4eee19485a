"""DRFA, called DRFL in papers/002: distributionally robust averaging with local steps.

Y. Deng, M. M. Kamani, M. Mahdavi, Distributionally robust federated averaging, NeurIPS 2020, arXiv 2102.12660,
Algorithm 1. min_w max_λ Σ λ_i f_i(w): clients are drawn by λ and average their models. λ ascends on losses at the
average of the models after a random local step t', evaluated by clients drawn uniformly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.afl import ClientWeights, concentration
from fedloom.algorithms.base import Conversation, Round, Setup, conversation
from fedloom.algorithms.client import LocalTrainer
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FineTuningClient, PersonalizeRequest, SharedModelServer, Update
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.progress import LoopState
from fedloom.algorithms.sums import SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.messages import Message, Quantity, broadcast, rows


class DRFATrainRequest(Message):
    """Opening of training: the shared model, and the step t' (1 ... τ) whose model the client notes."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]
    moment: Tensor = broadcast(Quantity.COUNT)  # [1] float64


class NotedUpdate(Update):
    """Update after local training, and the update after t' steps."""

    delta_noted: Tensor = rows(Quantity.MODEL_UPDATE, "s")  # [c, d]


class LossRequest(Message):
    """Opening of the second conversation: the average of the models after t' steps."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class BatchLoss(Message):
    """Loss of one mini-batch at that model."""

    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64


class DRFAServer(SharedModelServer):
    """Server of DRFA, which keeps w and λ."""

    def __init__(self, settings: DRFASettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup, generator)
        self.weights = ClientWeights(setup)
        self.state["weights"] = self.weights.start

    def update_bounds(self, examples: int) -> Mapping[str, float]:
        """Return the bounds of local training."""
        bounds: dict[str, float] = self.settings.local.update_bounds(examples)
        return bounds | ({"delta_noted": bounds["delta_theta"]} if "delta_theta" in bounds else {})

    def train_round(self, round: Round) -> base.Statistics:
        """Perform one iteration s of Algorithm 1."""
        s, theta, weights = self.settings, self.state["theta"], self.state["weights"]
        cohort = round.sample(weights=weights, replace=s.replace)  # line 2
        moment = torch.randint(1, s.local.steps + 1, (1,), generator=round.generator("moment"))  # line 3
        updates = cohort.send(DRFATrainRequest(theta, moment.double()), NotedUpdate)  # lines 4-10
        asked = round.sample(purpose="losses")  # line 13
        losses = asked.send(LossRequest(theta + updates.mean(updates.delta_noted)), BatchLoss)  # lines 12, 14
        self.state["theta"] = theta + updates.mean(updates.delta_theta)  # line 11
        rate = s.local.steps * s.gamma
        self.state["weights"] = self.weights.ascend(weights, rate, asked.clients, losses)  # lines 15-16
        return base.statistics_of(updates) | concentration(self.state["weights"])


class DRFAClient(FineTuningClient):
    """Client of DRFA, which trains and reports its loss."""

    @conversation
    def train(self, clients: ClientGroup, opening: DRFATrainRequest) -> Conversation:
        """Perform lines 4-10."""
        s, start, moment = self.settings.local, opening.theta.expand(len(clients), -1), int(opening.moment)
        local = LocalTrainer(self.setup.model, clients, mask_absent=s.mask_absent)
        w = local.parameters(start)
        leaves, losses, noted = list(w.values()), list[Tensor](), start.clone()
        step, counts = local.sgd(leaves, s), [s.steps] * len(clients)
        state = LoopState(w, tensors=[noted], histories=[losses], optimizers=[step])
        for pieces in local.steps(s, counts, "train", state):
            gradients, loss = local.gradient(w, *pieces)
            losses.append(loss)
            step(gradients, None)
            if len(losses) == moment:
                noted.copy_(local.join(w))
        trained = local.trained(local.join(w), losses, counts, "local.lr", s.lr)
        yield NotedUpdate(trained.theta - start, trained.steps, trained.loss, noted - start)
        return None

    @conversation
    def measure(self, clients: ClientGroup, opening: LossRequest) -> Conversation:
        """Perform line 14."""
        s = self.settings.local
        local = LocalTrainer(self.setup.model, clients, mask_absent=s.mask_absent)
        w = local.parameters(opening.theta.expand(len(clients), -1))
        batch = next(local.batches(s.batch_size, [1] * len(clients), "loss", augmented=False))
        yield BatchLoss(local.measured(w, batch).double()[:, None])
        return None


class DRFASettings(Settings):
    """Keys of ``algorithm`` for DRFA."""

    gamma: float = Field(
        default=0.08, ge=0, le=1e6, description="γ, step size of λ for each local step; 0 keeps λ uniform"
    )
    replace: bool = Field(default=True, description="draw clients with replacement; a repeated client counts each time")
    local: LocalSGD = Field(default=LocalSGD(steps=5, momentum=0.0), description="local training, τ being its steps")
    personalize_steps: int = Field(default=0, ge=0, description="local SGD steps from the global model to personal")

    @model_validator(mode="after")
    def _same_steps(self) -> Self:
        if self.local.steps is None:
            raise ValueError("local.epochs: set local.steps instead, because t' is a step of all clients")
        if self.gamma and not self.replace:
            raise ValueError(
                f"replace: with gamma {self.gamma:g}, fewer clients may have a positive weight than are drawn; set it "
                "to true, or gamma to 0"
            )
        return self


class DistributionallyRobustFedAvg(base.Algorithm):
    """Distributionally robust averaging with local steps."""

    name = "drfa"
    no_sums = "draws a client more than once into a sum; set algorithm.replace to false"
    settings = DRFASettings
    example = {"gamma": 0.05, "local": {"steps": 3, "batch_size": 4, "lr": 0.05}}
    server = DRFAServer
    client = DRFAClient
    messages = (DRFATrainRequest, NotedUpdate, LossRequest, BatchLoss, PersonalizeRequest)
    predictors = {"personal": "DRFA + fine-tuning", "global": "DRFA"}
    roster_data = "a weight of each client"
    no_example_privacy = "Clients are weighted by their losses, which have no noise."

    def sums(self, settings: DRFASettings) -> SummedFields:
        """Return the sum of the updates; losses are separate answers."""
        return {} if settings.replace else sums_of(NotedUpdate)

    def noisy_sums_suffice(self, settings: DRFASettings) -> str | None:
        """Return the reason: cohorts depend on data."""
        return "draws cohorts by weights that follow the clients' losses, which have no noise"


DRFA = DistributionallyRobustFedAvg()
