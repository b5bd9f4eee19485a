"""FedPer: a shared body and a personal head, trained together.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, Federated learning with personalization layers, 2019,
arXiv 1912.00818, Algorithms 1 and 2. It is FedRep without alternation: a client trains body and head at once, and only
the body is sent. The personalization layer here is the last linear layer. A client without a head, in training or
afterwards, starts from one drawn by its own generator.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedloom.algorithms.client import Trained, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging
from fedloom.algorithms.fedrep import FedRep, with_heads
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.models.flat import FlatModel


class FedPerSettings(Averaging):
    """Keys of ``algorithm`` for FedPer."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="training in a round, of body and head together")
    personalize_epochs: int = Field(default=20, ge=0, description="epochs that train a head for a client without one")


class FedPer(FedRep):
    """Shared body and personal heads, trained together."""

    name = "fedper"
    settings = FedPerSettings
    example = {}
    predictors = {"personal": "FedPer"}
    adaptation_key = "local.lr"
    no_example_privacy = None  # body and head take the same noisy steps
    noisy_training = ("local",)

    def train(self, model: FlatModel, group: ClientGroup, body: Tensor, s: FedPerSettings) -> Trained:
        """Train a client as in Algorithm 1: SGD on φ and h_i at once."""
        size = body.shape[1]
        trained = train(model, group, with_heads(model, group, body), s.local)  # lines 1-2
        group.save_state(head=trained.theta[:, size:])  # line 3
        return trained.part(trained.theta[:, :size])


FEDPER = FedPer()
