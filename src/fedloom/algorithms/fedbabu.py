"""FedBABU: the head keeps its initial values, only the body is trained and shared, and fine-tuning covers both.

J. Oh, S. Kim, S.-Y. Yun, FedBABU: Toward enhanced representation for federated image classification, ICLR 2022,
arXiv 2106.06042, Algorithm 1. The head, common to all clients, is sent along with the body; clients return only the
body.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedloom.algorithms.client import Trained, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.models.flat import FlatModel


class FedBABUSettings(Averaging):
    """Keys of ``algorithm`` for FedBABU."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="the body's training in a round")
    personalize_epochs: int = Field(default=5, ge=0, description="epochs on body and head from the global model")


class FedBABU(FedAvg):
    """FedAvg of the body under a fixed head; fine-tuning trains both (line 4 of docs/algorithms/fedbabu.md)."""

    name = "fedbabu"
    settings = FedBABUSettings
    predictors = {"personal": "FedBABU", "global": "FedBABU, shared body and first head"}
    shared = "body"
    sends_all = True
    no_example_privacy = None  # the body's steps are noisy

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: FedBABUSettings) -> Trained:
        """Run SGD on the body with the head frozen (line 2 of docs/algorithms/fedbabu.md)."""
        trained = train(model, group, theta, s.local, only="body")
        return trained.part(trained.theta[:, : model.layout.body_size])


FEDBABU = FedBABU()
