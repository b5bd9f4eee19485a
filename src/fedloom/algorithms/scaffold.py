"""SCAFFOLD: FedAvg in which clients correct their drift by control variates.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, SCAFFOLD: stochastic controlled averaging
for federated learning, ICML 2020, arXiv 1910.06378, Algorithm 1 with option II. A client keeps c_i, the mean gradient
of its last visit, and the server their mean c; every local step is corrected by c - c_i. Line numbers refer to
docs/algorithms/scaffold.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Conversation, Round, Setup, conversation
from fedloom.algorithms.client import Correction, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FineTuningClient, PersonalizeRequest, SharedModelServer, Update
from fedloom.algorithms.local_sgd import LocalSGD, PlainSGD
from fedloom.algorithms.sums import SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.messages import Message, Quantity, broadcast, rows


class ScaffoldServer(SharedModelServer):
    """Server that keeps w, and c, the mean of the c_i of all seen clients; c_i is zero for clients never drawn."""

    def __init__(self, settings: Any, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup, generator)
        self.state["c"] = torch.zeros_like(self.state["theta"])

    def train_round(self, round: Round) -> base.Statistics:
        """Perform lines 2 and 8-9; lost clients are in neither mean."""
        theta, c = self.state["theta"], self.state["c"]
        updates = round.sample().send(ModelAndControl(theta, c), ControlledUpdate)  # line 2
        share = updates.count / len(self.setup.roster)
        new_theta = theta + self.settings.server_lr * updates.mean(updates.delta_theta)
        self.state["theta"] = self.averaged(theta, updates, new_theta)  # line 8
        self.state["c"] = c + share * updates.mean(updates.delta_c)  # line 9
        return base.statistics_of(updates)


class ScaffoldClient(FineTuningClient):
    """Client that keeps c_i."""

    stateful = True
    settings: ScaffoldSettings

    @conversation
    def train(self, clients: ClientGroup, opening: ModelAndControl) -> Conversation:
        """Perform lines 3-7."""
        w, c = (vector.expand(len(clients), -1) for vector in (opening.theta, opening.c))
        c_i = clients.load_state("c", torch.zeros_like(w))
        s, layout = self.settings.local.sgd, self.setup.model.layout
        control = Correction(controlled, {"c": c, "c_i": c_i})
        trained = train(self.setup.model, clients, w, s, correct=control)  # lines 3-5
        mean_step = (w - trained.theta) / (trained.steps.to(w) * s.rate(clients.round))
        mean_step[:, layout.mask(layout.buffers)] = 0  # no gradient moves buffers
        new = c_i - c + mean_step  # line 6
        clients.save_state(c=new)
        yield ControlledUpdate(trained.theta - w, trained.steps, trained.loss, new - c_i)  # line 7
        return None


def controlled(
    gradients: list[Tensor], w: list[Tensor], start: list[Tensor], controls: Mapping[str, list[Tensor]]
) -> list[Tensor]:
    """Return g_i(y_i) - c_i + c (line 5)."""
    del w, start
    return list(torch._foreach_add(gradients, torch._foreach_sub(controls["c"], controls["c_i"])))


class ControlledSGD(PlainSGD):
    """SGD settings of steps whose mean, divided by the learning rate, is the mean gradient of a visit."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        given_keys = value if isinstance(value, dict) else {}
        error = PydanticCustomError(
            "refused_key",
            "control variates are mean gradients only of plain SGD, without momentum, decay and clipping; leave it out",
        )
        foreign = [name for name in given_keys if name in LocalSGD.model_fields and name not in cls.model_fields]
        if foreign:
            details = [InitErrorDetails(type=error, loc=(name,), input=given_keys[name]) for name in foreign]
            raise ValidationError.from_exception_data(cls.__name__, details)
        return value


class ScaffoldSettings(Settings):
    """Keys of ``algorithm`` for SCAFFOLD: plain steps, whose mean is the mean gradient, and means by client."""

    server_lr: float = Field(default=1.0, gt=0, description="η_g, factor on the average update")
    local: ControlledSGD = Field(default=ControlledSGD(steps=50), description="local training in a round")
    personalize_steps: int = Field(default=0, ge=0, description="local SGD steps from the global model to personal")

    @property
    def adaptation(self) -> LocalSGD:
        """Plain steps of fine-tuning."""
        return self.local.sgd.with_steps(steps=self.personalize_steps)


class ModelAndControl(Message):
    """Opening of training: w and c."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]
    c: Tensor = broadcast(Quantity.GRADIENT)  # [d]


class ControlledUpdate(Update):
    """Result of local training, and the change of c_i."""

    delta_c: Tensor = rows(Quantity.GRADIENT, "d")  # [c, d]


class Scaffold(base.Algorithm):
    """FedAvg with control variates."""

    name = "scaffold"
    settings = ScaffoldSettings
    server = ScaffoldServer
    client = ScaffoldClient
    messages = (ModelAndControl, ControlledUpdate, PersonalizeRequest)
    predictors = {"personal": "SCAFFOLD + fine-tuning", "global": "SCAFFOLD"}
    roster_data = "a mean over all clients"
    no_example_privacy = None  # c_i follows from the results of noisy steps
    noisy_training = ("local",)

    def sums(self, settings: Any) -> SummedFields:
        """Return the sum of the updates of model and control variate."""
        return sums_of(ControlledUpdate)


SCAFFOLD = Scaffold()
