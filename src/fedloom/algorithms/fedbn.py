"""FedBN: normalization layers stay with the clients, and everything else is averaged.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, FedBN: Federated learning on non-IID features via local batch normalization,
ICLR 2021, arXiv 2102.07623, Algorithm 1. A client keeps the scales, shifts and running statistics of its normalization
layers between rounds; they are never sent. Line numbers refer to docs/algorithms/fedbn.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from fedloom.algorithms.client import adapt
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD, adaptation_of
from fedloom.algorithms.requirements import Need
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
    settings: ClassVar[Any] = FedBNSettings
    needs: ClassVar[tuple[Need, ...]] = ("normalization",)
    predictors: ClassVar[Mapping[str, str]] = {"personal": "FedBN"}
    stateful = True

    def own(self, model: FlatModel, s: Any) -> tuple[str, ...]:
        """Return the entries that a client keeps and, if it has none, trains alone: normalization layers."""
        return model.layout.normalization

    def starts_alike(self, settings: Any) -> bool:
        """Return True: a client's own entries start as the model has them."""
        return True

    def kept(self, model: FlatModel, s: Any) -> tuple[str, ...]:
        """Return the client's own entries, with other moving buffers if they are local (lines 2-4)."""
        kept = {*self.own(model, s), *super().kept(model, s)}
        return tuple(name for name, _ in model.layout.entries if name in kept)

    def personalize(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: Any) -> dict[str, Tensor]:
        """Return the shared entries with the client's own (line 5); a new client trains its own (line 6)."""
        options = {"only": self.own(model, s), "purpose": "personalize"}
        return {"personal": adapt(model, group, theta, adaptation_of(s), group.new, **options)}


FEDBN = FedBN()
