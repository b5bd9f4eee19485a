"""q-FedAvg: averaging that weights clients with larger losses more.

T. Li, M. Sanjabi, A. Beirami, V. Smith, Fair resource allocation in federated learning, ICLR 2020, arXiv 1905.10497,
Algorithm 2. It minimizes Σ F_k(w)^(q+1)/(q+1) by steps whose size follows from q and from L, an estimate of the losses'
smoothness. Clients send the paper's quantities divided by L, so that q = 0 is exactly FedAvg, and the server needs
only sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.client import LocalTrainer, Trained, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg, Update
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.sums import Summed, SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.messages import Quantity, Replies, rows
from fedloom.models.flat import FlatModel


class FairUpdate(Update):
    """Update with Δ_k/L = F_k^q (w_k - w) in ``delta_theta``, and with h_k/L."""

    h: Tensor = rows(Quantity.OTHER, 1)  # [c, 1] float64


class MomentumFreeSGD(LocalSGD):
    """SGD settings without momentum by default, so that one step has size 1/L."""

    momentum: float | None = Field(default=0.0, ge=0, lt=1, description="momentum; L = 1/lr holds without it")

    @model_validator(mode="after")
    def _steps_of_size(self) -> Self:
        if self.optimizer != "sgd":
            raise ValueError(f"optimizer: must be sgd, because L is 1/lr for its steps alone (got {self.optimizer})")
        return self


class QFedAvgSettings(Settings):
    """Keys of ``algorithm`` for q-FedAvg."""

    q: float = Field(
        default=0.2, ge=0, description="exponent q; larger values give large losses more weight; 0 is FedAvg"
    )
    epsilon: float = Field(default=1e-10, gt=0, description="number added to F_k, whose exponent q - 1 may be negative")
    local: MomentumFreeSGD = Field(
        default=MomentumFreeSGD(steps=5), description="local training in a round; L is 1/lr, at the lr of the round"
    )
    personalize_steps: int = Field(default=0, ge=0, description="local SGD steps from the global model to personal")


class QFedAvg(FedAvg):
    """FedAvg that weights clients with larger losses more."""

    name = "q-fedavg"
    settings = QFedAvgSettings
    example = {"q": 1.0}
    predictors = {"personal": "q-FedAvg + fine-tuning", "global": "q-FedAvg"}
    update = FairUpdate
    no_example_privacy = "Clients scale their updates by their losses, which have no noise."

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: QFedAvgSettings) -> Trained:
        """Perform lines 5-7: SGD from w, and F_k at the received w, over all train data."""
        local = LocalTrainer(model, group, mask_absent=s.local.mask_absent)
        f = local.measured(local.parameters(theta), *local.everything()).double() + s.epsilon
        trained = train(model, group, theta, s.local)  # line 5
        change, weight = trained.theta - theta, f**s.q
        lr = s.local.rate(group.round)
        is_buffer = model.layout.mask(model.layout.buffers).to(theta.device)
        gradient = change.masked_fill(is_buffer, 0) if model.layout.buffers else change
        h = s.q * f ** (s.q - 1) * gradient.double().square().sum(1) / lr + weight  # lines 6-7, L being 1/lr
        overflown = f.isfinite() & ~(weight.to(change.dtype) * h).isfinite()
        for i in overflown.nonzero()[:, 0].tolist():
            group.fail_client(i, f"F_k^q overflows, F_k being {float(f[i]):.3g}; lower algorithm.q (now {s.q:g})")
        weighted_change = weight.to(change.dtype)[:, None] * change
        answer = {"delta_theta": torch.where(is_buffer, change, weighted_change), "h": h[:, None]}
        return dataclasses.replace(trained, also=answer)

    def aggregate(self, theta: Tensor, updates: Replies[Any], s: QFedAvgSettings) -> Tensor:
        """Return w - Σ Δ_k / Σ h_k over the clients that answered (line 8).

        Raise FloatingPointError if F_k^q, and with it h_k, underflows to 0 for all of them, or their noisy sum is not
        positive.
        """
        total = updates.total(updates.h)
        if total <= 0:
            raise FloatingPointError(
                "the noise on Σ h_k exceeds it; draw more clients per round, or lower the noise"
                if updates.is_noisy
                else f"the step is not finite, because every F_k^q is 0; lower algorithm.q (now {s.q:g})"
            )
        change: Tensor = updates.mean(updates.delta_theta) / (total / updates.count)
        return theta + change

    def sums(self, settings: Any) -> SummedFields:
        """Return the sums of the updates and of h_k; the server divides the former by the latter."""
        return sums_of(self.update, h=Summed(learned=True))

    def update_bounds(self, s: Any, examples: int) -> Mapping[str, float]:
        """Return the bound of the number of steps."""
        return {"steps": s.local.count(examples)}


Q_FEDAVG = QFedAvg()
