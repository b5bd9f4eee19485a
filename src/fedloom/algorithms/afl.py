"""AFL: a shared model for the worst mixture of the clients' distributions.

M. Mohri, G. Sivek, A. T. Suresh, Agnostic federated learning, ICML 2019, arXiv 1902.00146, Figure 3 (Stochastic-AFL).
min_w max_λ Σ λ_i f_i(w), λ on the simplex: w descends, λ ascends on the clients' losses, and the result is the average
of all w. Other methods that weight clients by their losses share the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Round, Setup
from fedloom.algorithms.fedavg import FedAvg, FedAvgServer, PersonalizeRequest, SharedModel
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.sums import SummedFields
from fedloom.core.settings import Settings
from fedloom.messages import Replies


class ClientWeights:
    """Weights λ ``[n]`` float64, one per client of the roster, initially 1/n."""

    def __init__(self, setup: Setup) -> None:
        self.row, n = setup.rows, len(setup.roster)
        self.start = torch.full((n,), 1 / max(1, n), dtype=torch.float64)

    def of(self, clients: Sequence[str], weights: Tensor) -> Tensor:
        """Return n λ_i of some clients: exactly 1 while λ has not moved."""
        return weights[[self.row[client] for client in clients]] / self.start[0]

    def ascend(self, weights: Tensor, rate: float, clients: Sequence[str], replies: Replies[Any]) -> Tensor:
        """Return λ + rate · v, projected: v_i is n/m times the loss of each of the m clients that answered, else 0."""
        v, each = torch.zeros_like(weights), len(weights) / int(replies.present.sum())
        for client, loss, is_present in zip(
            clients, replies.loss[:, 0].tolist(), replies.present.tolist(), strict=True
        ):
            v[self.row[client]] += each * loss if is_present else 0.0
        return project_onto_simplex(weights + rate * v) if rate else weights


def project_onto_simplex(v: Tensor) -> Tensor:
    """Return the point of {p: p_i ≥ 0, Σ p_i = 1} nearest to v, ``[n] -> [n]``.

    It is max(v - t, 0) for the t that makes the sum 1, found by sorting: J. Duchi, S. Shalev-Shwartz, Y. Singer,
    T. Chandra, Efficient projections onto the ℓ1-ball for learning in high dimensions, ICML 2008, Figure 1.
    """
    largest = v.sort(descending=True).values
    excess = (largest.cumsum(0) - 1) / torch.arange(1, len(v) + 1, dtype=v.dtype)
    t = excess[int((largest > excess).sum()) - 1]
    return (v - t).clamp(min=0)


def concentration(weights: Tensor) -> base.Statistics:
    """Return statistics of λ; 1/Σ λ² is the number of equally weighted clients with the same concentration."""
    return {"weight_largest": float(weights.max()), "effective_clients": float(1 / weights.square().sum())}


class WeightedServer(FedAvgServer):
    """Server that moves w by the mean of n λ_i Δw_i, and λ along the reported losses."""

    def __init__(self, method: FedAvg, settings: Any, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(method, settings, setup, generator)
        self.weights = ClientWeights(setup)
        self.state["weights"] = self.weights.start

    def train_round(self, round: Round) -> base.Statistics:
        """Perform one descent of w and one ascent of λ, both from the round's start."""
        cohort, weights = round.sample(), self.state["weights"]
        updates = cohort.send(SharedModel(self.state["theta"]), self.method.update)
        chances = updates.mean_weights * self.weights.of(cohort.clients, weights)
        theta = self.state["theta"]
        target = theta + self.settings.server_lr * updates.mean(updates.delta_theta, chances)
        self.state["theta"] = self.averaged(theta, updates, target)
        self.state["weights"] = self.weights.ascend(weights, self.settings.weights_lr, cohort.clients, updates)
        return base.statistics_of(updates) | concentration(self.state["weights"])


class AFLServer(WeightedServer):
    """Server of AFL, which also keeps the average of w."""

    def __init__(self, method: FedAvg, settings: Any, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(method, settings, setup, generator)
        self.state["average"] = self.state["theta"]

    def train_round(self, round: Round) -> base.Statistics:
        """Perform a round, and include its w in the average over all rounds so far."""
        statistics = super().train_round(round)
        average = self.state["average"]
        self.state["average"] = average + (self.state["theta"] - average) / round.number
        return statistics

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the average."""
        return cohort.send(PersonalizeRequest(self.state["average"]))


class AFLSettings(Settings):
    """Keys of ``algorithm`` for AFL."""

    weights_lr: float = Field(
        default=0.1, ge=0, le=1e6, description="step size of the clients' weights λ; 0 keeps them equal"
    )
    server_lr: float = Field(default=1.0, gt=0, description="factor on the weighted average of the steps")
    local: LocalSGD = Field(
        default=LocalSGD(steps=1, lr=0.1, momentum=0.0), description="descent of w: one step is the paper's"
    )
    personalize_steps: int = Field(default=0, ge=0, description="local SGD steps from the global model to personal")


class AgnosticFL(FedAvg):
    """Shared model for the worst mixture of the clients' distributions."""

    name = "afl"
    settings = AFLSettings
    example = {"weights_lr": 0.2, "local": {"steps": 1, "batch_size": 4, "lr": 0.05}}
    server_class = AFLServer
    no_sums = "weights each client's own update at the server; drfa draws clients by such weights instead"
    predictors = {"personal": "AFL + fine-tuning", "global": "AFL"}
    roster_data = "a weight of each client"
    no_example_privacy = "Clients are weighted by their losses, which have no noise."

    def sums(self, settings: Any) -> SummedFields:
        """Return none: the server weights each update."""
        return {}


AFL = AgnosticFL()
