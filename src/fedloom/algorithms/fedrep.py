"""FedRep: a shared body and a personal head, trained in alternation.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, Exploiting shared representations for personalized federated
learning, ICML 2021, arXiv 2102.07078, Algorithm 1. In a round a client trains its head with the body frozen, then the
body with the head frozen; only the body is sent. The head is the last linear layer, and the client's state between
rounds. A client without a head, in training or afterwards, starts from one drawn by its own generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.client import Trained, adapt, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD, adaptation_of
from fedloom.models.flat import FlatModel


def with_heads(model: FlatModel, group: ClientGroup, body: Tensor) -> Tensor:
    """Return θ ``[g, d]``: the shared body with each client's kept head, or its own random head if it is new."""
    heads = [model.init(group.generator(i, "own-head"), body.dtype)[body.shape[1] :] for i in range(len(group))]
    return torch.cat([body, group.load_state("head", torch.stack(heads).to(body.device))], dim=1)


class FedRepSettings(Averaging):
    """Keys of ``algorithm`` for FedRep; ``weighting`` defaults to the paper's, uniform."""

    weighting: Literal["examples", "uniform"] = Field(
        default="uniform", description="average uniformly, or by n_i (official code)"
    )
    local: LocalSGD = Field(default=LocalSGD(epochs=1), description="the body's training in a round")
    head: LocalSGD = Field(default=LocalSGD(epochs=10), description="the head's training in a round, before the body's")
    personalize_epochs: int = Field(default=20, ge=0, description="epochs that train a head for a client without one")

    @property
    def adaptation(self) -> LocalSGD:
        """Training of a new client's head."""
        return self.head.with_steps(epochs=self.personalize_epochs)


class FedRep(FedAvg):
    """Shared body and personal heads, trained in alternation."""

    name = "fedrep"
    settings: ClassVar[Any] = FedRepSettings
    example = {"head": {"epochs": 1, "batch_size": 4, "lr": 0.05}}
    predictors = {"personal": "FedRep"}
    shared = "body"
    stateful = True
    adaptation_key: ClassVar[str] = "head.lr"
    no_example_privacy = None  # both trainings are noisy, the head's because it affects the body's gradients
    noisy_training: ClassVar[tuple[str, ...]] = ("head", "local")

    def train(self, model: FlatModel, group: ClientGroup, body: Tensor, s: Any) -> Trained:
        """Run ClientUpdate of Algorithm 1: steps on the head h_i, then on the body φ, each with fresh momentum."""
        theta = with_heads(model, group, body)  # line 1
        head = train(model, group, theta, s.head, only="head", purpose="head", key="head.lr")  # line 2
        both = train(model, group, head.theta, s.local, only="body")  # line 3
        group.save_state(head=both.theta[:, body.shape[1] :])  # line 4
        return Trained(both.theta[:, : body.shape[1]], head.steps + both.steps, both.loss)

    def personalize(self, model: FlatModel, group: ClientGroup, body: Tensor, s: Any) -> Mapping[str, Tensor]:
        """Return the shared body with each client's head; a new client trains one by SGD, the body frozen."""
        theta, options = (
            with_heads(model, group, body),
            {"purpose": "personalize", "key": self.adaptation_key},
        )  # line 6
        return {"personal": adapt(model, group, theta, adaptation_of(s), group.new, only="head", **options)}


FEDREP = FedRep()
