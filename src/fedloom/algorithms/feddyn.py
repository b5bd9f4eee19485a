"""FedDyn: FedAvg in which every client's objective is corrected in each round, so that all agree on the optimum.

D. A. E. Acar, Y. Zhao, R. M. Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, Federated learning based on dynamic
regularization, ICLR 2021, arXiv 2111.04263, Algorithm 1. A client keeps g_i, the gradient of its loss at the model of
its last visit, and minimizes f_i(w) - ⟨g_i, w⟩ + α/2 ‖w - w_t‖². The server keeps h, the mean of the g_i of all seen
clients. A client minimizes by the steps of ``local``, not exactly, and its α does not depend on its size. Line numbers
refer to docs/algorithms/feddyn.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.client import Correction, Trained, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg, FedAvgServer
from fedloom.algorithms.local_sgd import LocalSGD, check_overshoot
from fedloom.core.settings import Settings
from fedloom.messages import Replies
from fedloom.models.flat import FlatModel


class FedDynServer(FedAvgServer):
    """Server that keeps w, and h, the mean of the g_i of all seen clients; g_i is zero for clients never drawn."""

    def __init__(self, method: FedAvg, settings: Any, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(method, settings, setup, generator)
        self.state["h"] = torch.zeros_like(self.state["theta"])

    def aggregate(self, shared: Tensor, updates: Replies[Any]) -> Tensor:
        """Perform lines 6 and 7; lost clients are in neither mean."""
        mean, alpha = updates.mean(updates.delta_theta), self.settings.alpha
        share = updates.count / len(self.setup.roster)
        if self._moving is not None:
            mean = mean.masked_fill(self._moving, 0)  # buffers have no gradients
        self.state["h"] = h = self.state["h"] - alpha * share * mean
        moved: Tensor = shared + mean - h / alpha
        return moved


class FedDynSettings(Settings):
    """Keys of ``algorithm`` for FedDyn, whose means count every client once."""

    alpha: float = Field(default=0.1, gt=0, description="α of the term α/2 ‖w - w_t‖², and the scale of g_i and h")
    local: LocalSGD = Field(default=LocalSGD(steps=50, momentum=0.0), description="local training in a round")
    personalize_steps: int = Field(default=0, ge=0, description="local SGD steps from the global model to personal")

    @model_validator(mode="after")
    def _check_stability(self) -> Self:
        check_overshoot("alpha", self.alpha, "local.lr", self.local.lr)
        return self


class FedDyn(FedAvg):
    """FedAvg with dynamic regularization."""

    server_class = FedDynServer
    name = "feddyn"
    settings = FedDynSettings
    predictors = {"personal": "FedDyn + fine-tuning", "global": "FedDyn"}
    stateful = True
    roster_data = "a mean over all clients"
    no_example_privacy = None  # g_i follows from the results of noisy steps

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: FedDynSettings) -> Trained:
        """Run SGD on f_i(w) - ⟨g_i, w⟩ + α/2 ‖w - w_t‖² from w_t (line 3), and renew g_i (line 4)."""
        g = group.load_state("g", torch.zeros_like(theta))

        def change(
            gradients: list[Tensor], w: list[Tensor], start: list[Tensor], values: Mapping[str, list[Tensor]]
        ) -> list[Tensor]:
            del start
            return list(torch._foreach_add(torch._foreach_sub(gradients, values["linear"]), w, alpha=s.alpha))

        trained = train(model, group, theta, s.local, correct=Correction(change, {"linear": g + s.alpha * theta}))
        moved = (trained.theta - theta).masked_fill(model.layout.mask(model.layout.buffers).to(theta.device), 0)
        group.save_state(g=g - s.alpha * moved)
        return trained


FEDDYN = FedDyn()
