"""FedProx: FedAvg with a proximal term on the clients, and with clients that complete only part of their steps.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, Federated optimization in heterogeneous networks,
MLSys 2020, arXiv 1812.06127, Algorithm 2. A client minimizes f_i(w) + μ/2 ‖w - w_t‖² from w_t, the round's shared
model; a client that completes only part of its steps still counts (§3.2, "tolerating partial work").
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.client import Trained, proximal, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg, FedAvgSettings
from fedloom.algorithms.local_sgd import check_overshoot
from fedloom.models.flat import FlatModel


def work(group: ClientGroup, s: FedProxSettings) -> list[int]:
    """Return the steps of each client: all of them, or fewer if it is a straggler in this round."""
    counts = [s.local.count(len(client.train)) for client in group.clients]  # line 2
    for i, count in enumerate(counts):
        late, share = torch.rand(2, generator=group.generator(i, "straggler")).tolist()
        if late < s.stragglers and count > 1:
            counts[i] = 1 + int(share * (count - 1))
    return counts


class FedProxSettings(FedAvgSettings):
    """Keys of ``algorithm`` for FedProx."""

    mu: float = Field(default=0.01, ge=0, description="μ of the term μ/2 ‖w - w_t‖²; 0 is FedAvg")
    stragglers: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="probability that a client makes only some of its steps, from 1 to all but one, uniformly",
    )

    @model_validator(mode="after")
    def _check_stability(self) -> Self:
        check_overshoot("mu", self.mu, "local.lr", self.local.lr)
        return self


class FedProx(FedAvg):
    """FedAvg with a proximal term, and with stragglers."""

    name = "fedprox"
    settings = FedProxSettings
    example = {"mu": 0.5, "stragglers": 0.5}
    predictors = {"personal": "FedProx + fine-tuning", "global": "FedProx"}
    no_example_privacy = None  # the proximal term does not depend on data

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: FedProxSettings) -> Trained:
        """Run SGD on f_i(w) + μ/2 ‖w - w_t‖² from w_t (eq. 2)."""
        term = proximal(s.mu) if s.mu else None
        return train(model, group, theta, s.local, correct=term, counts=work(group, s))  # lines 2, 3


FEDPROX = FedProx()
