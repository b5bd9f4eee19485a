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

from fedloom.algorithms.base import Algorithm, Task
from fedloom.algorithms.recipe import FineTuning, SharedModelServer, mean_update, shared_model
from fedloom.messages import Replies


class OptimizingServer(SharedModelServer):
    """Server that keeps w and the optimizer's state: m, and v for adaptive steps."""

    def __init__(self, settings: Any, task: Task, generator: torch.Generator, **method: Any) -> None:
        super().__init__(settings, task, generator, **method | {"aggregate": self._step})
        w = self.state["theta"]
        self.state["m"] = torch.zeros_like(w)
        if isinstance(settings, AdaptiveSettings):
            self.state["v"] = torch.full_like(w, settings.tau**2)  # line 1

    def _step(self, w: Tensor, updates: Replies[Any], s: FineTuning) -> Tensor:
        """Perform lines 5-8."""
        delta = mean_update(updates, s)  # line 5
        if isinstance(s, FedAvgMSettings):
            self.state["m"] = m = s.momentum * self.state["m"] + delta  # line 6, FedAvgM
            return w + s.server_lr * (delta + s.momentum * m if s.nesterov else m)  # line 8, FedAvgM
        assert isinstance(s, AdaptiveSettings)
        self.state["m"] = m = s.beta1 * self.state["m"] + (1 - s.beta1) * delta  # line 6
        self.state["v"] = v = s.second(self.state["v"], delta.square())  # line 7
        return w + s.server_lr * (m / (v.sqrt() + s.tau))  # line 8


class FedAvgMSettings(FineTuning):
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


class AdaptiveSettings(FineTuning):
    """Keys common to FedAdam and FedYogi; ``server_lr`` is the paper's η."""

    server_lr: float = Field(default=0.01, gt=0, description="rate η of the server's optimizer; tune it by decades")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="β₁ of m, the mean of the updates over rounds")
    beta2: float = Field(default=0.99, ge=0, le=1, description="β₂ of v, of their squares; 1 keeps v at τ²")
    tau: float = Field(default=1e-3, gt=0, description="τ, the degree of adaptivity: the smaller, the more")

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v ← β₂ v + (1 - β₂) Δ² (Adam)."""
        return self.beta2 * v + (1 - self.beta2) * square


class FedAdamSettings(AdaptiveSettings):
    """Keys of ``algorithm`` for FedAdam."""


class FedYogiSettings(AdaptiveSettings):
    """Keys of ``algorithm`` for FedYogi."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v ← v - (1 - β₂) Δ² sign(v - Δ²) (Yogi): v forgets no faster than it learns."""
        return v - (1 - self.beta2) * square * (v - square).sign()


def optimizing(name: str, settings: type[FineTuning], title: str) -> Algorithm:
    """Return FedAvg with an optimizing server."""
    titles = {"personal": f"{title} + fine-tuning", "global": title}
    return shared_model(name, settings, server=OptimizingServer, titles=titles)


FEDADAM = optimizing("fedadam", FedAdamSettings, "FedAdam")
FEDYOGI = optimizing("fedyogi", FedYogiSettings, "FedYogi")
FEDAVGM = optimizing("fedavgm", FedAvgMSettings, "FedAvgM")
