"""pFedMe: personal models near a shared model that follows their Moreau envelopes.

C. T. Dinh, N. H. Tran, T. D. Nguyen, Personalized federated learning with Moreau envelopes, NeurIPS 2020,
arXiv 2006.08848, Algorithm 1. A client starts its w_i at the shared w. R times it draws a batch, minimizes
f_i(θ) + λ/2 ‖θ - w_i‖² over θ by K gradient steps, and moves w_i by -ηλ(w_i - θ). The server moves w to the mean of
the w_i by β. The personal model is θ_i, not w_i, which public code reports. Within a visit θ carries over from batch
to batch, starting at w, which the paper leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.client import LocalTrainer, Trained, proximal, train
from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD, check_overshoot
from fedloom.algorithms.progress import LoopState
from fedloom.models.flat import FlatModel
from fedloom.privacy.examples import NoisySteps


class PFedMeSettings(Averaging):
    """Keys of ``algorithm`` for pFedMe; ``server_lr`` is the paper's β."""

    steps: int = Field(default=20, ge=1, description="R, steps of w_i in a round, each with its own batch")
    batch_size: int = Field(default=20, ge=1, description="batch size; a client with fewer examples uses them all")
    lr: float = Field(default=0.005, gt=0, description="η, rate of w_i")
    proximity: float = Field(default=15.0, gt=0, description="λ of λ/2 ‖θ_i - w_i‖²")
    inner_steps: int = Field(default=5, ge=1, description="K, gradient steps on θ_i for each batch")
    inner_lr: float = Field(default=0.05, gt=0, description="rate of the steps on θ_i")
    personalize_epochs: int = Field(default=20, ge=1, description="epochs that train θ_i from w")

    @model_validator(mode="after")
    def _contracting(self) -> Self:
        for key, rate in (("lr", self.lr), ("inner_lr", self.inner_lr)):
            check_overshoot(key, rate, "proximity", self.proximity)
        return self

    @property
    def adaptation(self) -> LocalSGD:
        """SGD that makes θ_i."""
        return LocalSGD(epochs=self.personalize_epochs, batch_size=self.batch_size, lr=self.inner_lr, momentum=0.0)


class PFedMe(FedAvg):
    """Shared model that follows the Moreau envelopes of the clients' losses."""

    name = "pfedme"
    settings = PFedMeSettings
    example = {"steps": 2, "inner_steps": 2, "batch_size": 4, "lr": 0.02}
    predictors = {"personal": "pFedMe", "global": "pFedMe, shared model"}
    no_example_privacy = None  # w_i follows noisy steps of θ_i

    def noisy_steps(self, settings: Any, examples: int, *, personalizing: bool = False) -> tuple[NoisySteps, ...]:
        """Return the steps of w_i, each with K gradients of one batch."""
        return () if personalizing else (NoisySteps(settings.batch_size, settings.steps, settings.inner_steps),)

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: PFedMeSettings) -> Trained:
        """Train a client as in Algorithm 1: R steps of w_i along λ(w_i - θ_i), the gradient of its Moreau envelope."""
        local = LocalTrainer(model, group)
        w, personal = local.parameters(theta), local.parameters(theta)  # line 1
        w.buffers = personal.buffers  # only calls of θ_i move them
        w_i, theta_i = list(w.values()), list(personal.values())
        pull, losses, counts = proximal(s.proximity).change, list[Tensor](), [s.steps] * len(group)

        def draw(skip: int) -> Iterator[Batch]:
            return local.batches(s.batch_size, counts, "train", skip=skip)

        for batch in local.continued(draw, LoopState(w, personal, histories=[losses]), counts):  # line 2
            for _ in range(s.inner_steps):  # line 3
                gradients, loss = local.gradient(personal, batch)
                losses.append(loss)
                with torch.no_grad():
                    torch._foreach_add_(theta_i, pull(gradients, theta_i, w_i, {}), alpha=-s.inner_lr)
            with torch.no_grad():
                torch._foreach_add_(w_i, torch._foreach_sub(w_i, theta_i), alpha=-s.lr * s.proximity)  # line 4
        return local.trained(local.join(w), losses, [s.steps * s.inner_steps] * len(group), "inner_lr", s.inner_lr)

    def personalize(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: PFedMeSettings) -> dict[str, Tensor]:
        """Return ``personal``, θ_i, an approximate minimum of f_i(θ) + λ/2 ‖θ - w‖², and ``global``, w."""
        correct = proximal(s.proximity)  # line 6
        personal = train(model, group, theta, s.adaptation, correct=correct, purpose="personalize", key="inner_lr")
        return {"personal": personal.theta, "global": theta}

    def update_bounds(self, s: Any, examples: int) -> Mapping[str, float]:
        """Return the bound of the number of steps."""
        return {"steps": s.steps * s.inner_steps}


PFEDME = PFedMe()
