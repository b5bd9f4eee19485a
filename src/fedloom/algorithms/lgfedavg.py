"""LG-FedAvg: a personal body and a shared head on top of it, the reverse of FedPer.

P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency, Think locally,
act globally: federated learning with local and global representations, 2020, arXiv 2001.01523, Algorithm 1. Both are
trained together, and only the head is averaged. All bodies start from the same draw, which is sent along with the head:
without a common start, the features of different clients would not be comparable.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.client import Trained, adapt, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD, adaptation_of
from fedloom.models.flat import FlatModel


def with_bodies(model: FlatModel, group: ClientGroup, theta: Tensor) -> Tensor:
    """Return θ ``[g, d]``: each client's kept body, or the common start if it is new, with the shared head."""
    size = model.layout.body_size
    return torch.cat([group.load_state("body", theta[:, :size]), theta[:, size:]], dim=1)


class LGFedAvgSettings(Averaging):
    """Keys of ``algorithm`` for LG-FedAvg."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="training in a round, of body and head together")
    personalize_epochs: int = Field(default=20, ge=0, description="epochs that train a body for a client without one")


class LGFedAvg(FedAvg):
    """Personal bodies under a shared head."""

    name = "lg-fedavg"
    settings = LGFedAvgSettings
    predictors = {"personal": "LG-FedAvg"}
    shared = "head"
    sends_all = True
    stateful = True
    no_example_privacy = None  # body and head take the same noisy steps

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: LGFedAvgSettings) -> Trained:
        """Perform lines 1 to 3 of docs/algorithms/lg-fedavg.md."""
        trained, size = train(model, group, with_bodies(model, group, theta), s.local), model.layout.body_size
        group.save_state(body=trained.theta[:, :size])
        return trained.part(trained.theta[:, size:])

    def personalize(
        self, model: FlatModel, group: ClientGroup, theta: Tensor, s: LGFedAvgSettings
    ) -> dict[str, Tensor]:
        """Return the shared head on each client's body (line 5); a new client trains one, the head frozen (line 6)."""
        theta, options = with_bodies(model, group, theta), {"only": "body", "purpose": "personalize"}
        return {"personal": adapt(model, group, theta, adaptation_of(s), group.new, **options)}


LGFEDAVG = LGFedAvg()
