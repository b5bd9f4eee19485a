"""FedBN: normalization layers stay with the clients, and everything else is averaged.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, FedBN: Federated learning on non-IID features via local batch normalization,
ICLR 2021, arXiv 2102.07623, Algorithm 1. A client keeps the scales, shifts and running statistics of its normalization
layers between rounds; they are never sent. Line numbers refer to docs/algorithms/fedbn.md.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from fedloom.algorithms.averaging import Averaging
from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.models.flat import FlatModel


class FedBNSettings(Averaging):
    """Keys of ``algorithm`` for FedBN."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="training in a round, of all layers together")
    personalize_epochs: int = Field(
        default=5, ge=0, description="epochs that train normalization layers for a client without its own"
    )


class FedBN(FedAvg):
    """FedAvg of everything but normalization layers."""

    name = "fedbn"
    settings = FedBNSettings
    needs = ("normalization",)
    predictors = {"personal": "FedBN"}
    stateful = True

    def kept(self, model: FlatModel) -> tuple[str, ...]:
        """Return the entries of normalization layers, with other moving buffers if they are local (lines 2-4)."""
        kept = {*model.layout.normalization, *super().kept(model)}
        return tuple(name for name, _ in model.layout.entries if name in kept)

    def personalize(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: FedBNSettings) -> dict[str, Tensor]:
        """Return the shared layers between the client's own (line 5); a new client trains its own (line 6)."""
        new = group.new
        if new and s.personalize_epochs:
            sgd, norms = s.local.with_steps(epochs=s.personalize_epochs), model.layout.normalization
            made = train(model, group, theta[new], sgd, only=norms, members=new, purpose="personalize")
            theta[new] = made.theta
        return {"personal": theta}

    def personalization_steps(self, s: Any, examples: int) -> int:
        """Return the steps of a new client's normalization layers."""
        steps: int = s.local.with_steps(epochs=s.personalize_epochs).count(examples)
        return steps


FEDBN = FedBN()
