"""FedOpt: FedAdam, FedYogi and FedAvgM, whose server optimizers take the clients' mean update as a gradient.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, H. B. McMahan, Adaptive federated
optimization, ICLR 2021, arXiv 2003.00295, Algorithm 2: no bias correction, and v starts at τ². FedAvgM: T.-M. H. Hsu,
H. Qi, M. Brown, Measuring the effects of non-identical data distribution for federated visual classification, 2019,
arXiv 1909.06335, §4.2. Clients run FedAvg's SGD. Line numbers refer to docs/algorithms/fedopt.md.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.fedavg import FedAvg, FedAvgServer, FedAvgSettings, mean_update
from fedloom.messages import Replies


class OptimizingServer(FedAvgServer):
    """Server that keeps w and the optimizer's state: m, and v for adaptive steps."""

    def __init__(self, method: FedAvg, settings: Any, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(method, settings, setup, generator)
        w = self.state["theta"]
        self.state["m"] = torch.zeros_like(w)
        if isinstance(settings, AdaptiveSettings):
            self.state["v"] = torch.full_like(w, settings.tau**2)  # line 1

    def aggregate(self, shared: Tensor, updates: Replies[Any]) -> Tensor:
        """Perform lines 5-8."""
        w, s = shared, self.settings
        delta = mean_update(updates, s)  # line 5
        if isinstance(s, FedAvgMSettings):
            self.state["m"] = m = s.momentum * self.state["m"] + delta  # line 6, FedAvgM
            along: Tensor = s.server_lr * (delta + s.momentum * m if s.nesterov else m)
            return w + along  # line 8, FedAvgM
        self.state["m"] = m = s.beta1 * self.state["m"] + (1 - s.beta1) * delta  # line 6
        self.state["v"] = v = s.second(self.state["v"], delta.square())  # line 7
        along = s.server_lr * (m / (v.sqrt() + s.tau))
        return w + along  # line 8


class FedAvgMSettings(FedAvgSettings):
    """Keys of ``algorithm`` for FedAvgM."""

    momentum: float = Field(default=0.9, ge=0, lt=1, description="the server's momentum β; 0 is FedAvg")
    nesterov: bool = Field(
        default=False, description="step along Δ + β m (Nesterov's momentum) in place of m, the formula of the paper"
    )

    @model_validator(mode="after")
    def _accelerated_by_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0, because without momentum it changes nothing (got 0)")
        return self


class AdaptiveSettings(FedAvgSettings):
    """Keys common to FedAdam and FedYogi; ``server_lr`` is the paper's η."""

    server_lr: float = Field(default=0.01, gt=0, description="rate η of the server's optimizer; tune it by decades")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="β₁ of m, the mean of the updates over rounds")
    beta2: float = Field(default=0.99, ge=0, le=1, description="β₂ of v, which tracks their squares; 1 keeps v at τ²")
    tau: float = Field(default=1e-3, gt=0, description="τ, the degree of adaptivity; smaller values adapt more")

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v ← β₂ v + (1 - β₂) Δ² (Adam)."""
        return self.beta2 * v + (1 - self.beta2) * square


class FedAdamSettings(AdaptiveSettings):
    """Keys of ``algorithm`` for FedAdam."""


class FedYogiSettings(AdaptiveSettings):
    """Keys of ``algorithm`` for FedYogi."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v ← v - (1 - β₂) Δ² sign(v - Δ²) (Yogi): v moves by (1 - β₂) Δ² in either direction."""
        return v - (1 - self.beta2) * square * (v - square).sign()


class FedOpt(FedAvg):
    """FedAvg with an optimizing server."""

    server_class = OptimizingServer


class FedAdam(FedOpt):
    """FedAvg whose server steps by Adam."""

    name = "fedadam"
    settings = FedAdamSettings
    predictors = {"personal": "FedAdam + fine-tuning", "global": "FedAdam"}


class FedYogi(FedOpt):
    """FedAvg whose server steps by Yogi."""

    name = "fedyogi"
    settings = FedYogiSettings
    predictors = {"personal": "FedYogi + fine-tuning", "global": "FedYogi"}


class FedAvgM(FedOpt):
    """FedAvg whose server steps with momentum."""

    name = "fedavgm"
    settings = FedAvgMSettings
    predictors = {"personal": "FedAvgM + fine-tuning", "global": "FedAvgM"}


FEDADAM, FEDYOGI, FEDAVGM = FedAdam(), FedYogi(), FedAvgM()
