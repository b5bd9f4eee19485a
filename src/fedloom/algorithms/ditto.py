"""Ditto: a personal model for each client, kept near a shared model that is trained independently of it.

T. Li, S. Hu, A. Beirami, V. Smith, Ditto: fair and robust federated learning through personalization, ICML 2021,
arXiv 2012.04221, Algorithm 1. The shared w is trained by FedAvg. A sampled client also makes steps of its v_i on
f_i(v) + λ/2 ‖v - w_t‖², w_t being the model received; v_i is its state between rounds. A client without a v_i, in
training or afterwards, starts at w. Line numbers refer to docs/algorithms/ditto.md.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.client import Trained, proximal, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD, check_overshoot
from fedloom.models.flat import FlatModel


def train_near(
    model: FlatModel,
    group: ClientGroup,
    v: Tensor,
    w: Tensor,
    s: DittoSettings,
    sgd: LocalSGD,
    members: list[int] | None = None,
) -> Trained:
    """Run SGD on f_i(v) + λ/2 ‖v - w‖² from v (line 5), for all clients of the group or some."""
    pull = proximal(s.proximity, anchor=w) if s.proximity else None
    key = "personal.lr"
    return train(model, group, v, sgd, correct=pull, members=members, purpose="personal", key=key, at_home=True)


class DittoSettings(Averaging):
    """Keys of ``algorithm`` for Ditto."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="the shared model's training in a round")
    personal: LocalSGD = Field(default=LocalSGD(steps=50), description="v_i's training whenever its client is drawn")
    proximity: float = Field(default=0.1, ge=0, description="λ of λ/2 ‖v_i - w‖²; 0 is local training from w")
    personalize_steps: int = Field(
        default=50,
        ge=0,
        description="steps that train v_i from w, with the settings of personal, for a client without one",
    )

    @model_validator(mode="after")
    def _contracting(self) -> Self:
        check_overshoot("proximity", self.proximity, "personal.lr", self.personal.lr)
        return self


class Ditto(FedAvg):
    """FedAvg, and personal models that stay near it."""

    name = "ditto"
    settings = DittoSettings
    example = {"personal": {"epochs": 1, "batch_size": 4, "lr": 0.05}, "proximity": 0.5}
    predictors = {"personal": "Ditto", "global": "Ditto, shared model"}
    stateful = True
    at_home = ("personal",)
    no_example_privacy = None  # w takes noisy steps, and v_i, which does not affect it, stays with its client

    def train(self, model: FlatModel, group: ClientGroup, w: Tensor, s: DittoSettings) -> Trained:
        """Train a client as in Algorithm 1: w as in FedAvg (line 3), and separately v_i (lines 4-5)."""
        shared = train(model, group, w, s.local)
        own = train_near(model, group, group.load_state("v", w), w, s, s.personal)
        group.save_state(v=own.theta)
        return Trained(shared.theta, shared.steps + own.steps, shared.loss)

    def personalize(self, model: FlatModel, group: ClientGroup, w: Tensor, s: DittoSettings) -> dict[str, Tensor]:
        """Return ``personal``, v_i, which new clients train from w (line 7), and ``global``, w."""
        v, new = group.load_state("v", w), group.new
        if new and s.personalize_steps:
            sgd = s.personal.with_steps(steps=s.personalize_steps)
            v[new] = train_near(model, group, w[new], w[new], s, sgd, new).theta
        return {"personal": v, "global": w}


DITTO = Ditto()
