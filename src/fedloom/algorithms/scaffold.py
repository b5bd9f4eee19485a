"""SCAFFOLD: FedAvg in which clients correct their drift by control variates.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, SCAFFOLD: stochastic controlled averaging
for federated learning, ICML 2020, arXiv 1910.06378, Algorithm 1 with option II. A client keeps c_i, the mean gradient
of its last visit, and the server their mean c; every local step is corrected by c - c_i. Line numbers refer to
docs/algorithms/scaffold.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import ClientGroup, Cohort, Conversation, Round, Task, conversation
from fedloom.algorithms.client import LocalSGD, train
from fedloom.algorithms.recipe import FineTuning, PersonalizeRequest, fine_tune, or_shared_alone
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.predictors import Predictors


class ScaffoldServer(base.ServerAlgorithm):
    """Server that keeps w, and c, the mean of the c_i of all seen clients; c_i is zero for clients never drawn."""

    def __init__(self, settings: Any, task: Task, generator: torch.Generator) -> None:
        super().__init__(settings, task)
        theta = task.model.init(generator, task.dtype)
        self.state |= {"theta": theta, "c": torch.zeros_like(theta)}

    def update_bounds(self, examples: int) -> Mapping[str, float]:
        """Return the bound of the number of steps."""
        return {"steps": self.settings.local.count(examples)}

    def train_round(self, round: Round) -> base.Statistics:
        """Perform lines 2 and 8-9; lost clients are in neither mean."""
        theta, c = self.state["theta"], self.state["c"]
        updates = round.sample().send(ModelAndControl(theta, c), ControlledUpdate)  # line 2
        share = int(updates.present.sum()) / len(self.task.roster)
        self.state["theta"] = theta + self.settings.server_lr * updates.mean(updates.delta_theta)  # line 8
        self.state["c"] = c + share * updates.mean(updates.delta_c)  # line 9
        return {"client_steps": updates.total(updates.steps), "loss": float(updates.mean(updates.loss))}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the shared model."""
        return cohort.send(PersonalizeRequest(self.state["theta"]))


class ScaffoldClient(base.ClientAlgorithm):
    """Client that keeps c_i."""

    predictors, stateful = ("personal", "global"), True

    @conversation
    def train(self, clients: ClientGroup, opening: ModelAndControl) -> Conversation:
        """Perform lines 3-7."""
        w, c = (vector.expand(len(clients), -1) for vector in (opening.theta, opening.c))
        c_i = clients.load_state("c", torch.zeros_like(w))
        s = self.settings.local
        trained = train(self.task.model, clients, w, s, correct=controlled, given={"c": c, "c_i": c_i})  # lines 3-5
        mean_step = (w - trained.theta) / (trained.steps.to(w) * s.lr)
        new = c_i - c + mean_step  # line 6
        clients.save_state(c=new)
        yield ControlledUpdate(trained.theta - w, trained.steps, trained.loss, new - c_i)  # line 7
        return None

    @conversation
    def personalize(self, clients: ClientGroup, opening: PersonalizeRequest) -> Predictors:
        """Return the shared model, fine-tuned as in FedAvg."""
        model, w = self.task.model, opening.theta.expand(len(clients), -1)
        return or_shared_alone(model, clients, w, lambda: fine_tune(model, clients, w, self.settings))

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """Return ``personalize_steps`` for ``personal``."""
        return self.settings.personalize_steps if predictor == "personal" else 0


def controlled(
    gradients: list[Tensor], w: list[Tensor], start: list[Tensor], given: dict[str, list[Tensor]]
) -> list[Tensor]:
    """Return g_i(y_i) - c_i + c (line 5)."""
    del w, start
    return list(torch._foreach_add(gradients, torch._foreach_sub(given["c"], given["c_i"])))


class PlainSGD(LocalSGD):
    """SGD settings whose mean step is the mean gradient, as line 6 requires: no momentum, no clipping."""

    momentum: float = Field(default=0.0, ge=0, lt=1, description="0: c_i is made of plain steps")
    clip: None = Field(default=None, description="null: c_i is made of plain steps")


class ScaffoldSettings(FineTuning):
    """Keys of ``algorithm`` for SCAFFOLD; ``server_lr`` is the paper's η_g."""

    weighting: Literal["uniform"] = Field(
        default="uniform", description="c is a mean in which every client counts once"
    )
    max_norm: None = Field(default=None, description="null: c would have no bound")
    trim: Literal[0] = Field(default=0, description="0: c is the mean of the clients' own")
    local: PlainSGD = Field(default=PlainSGD(steps=50), description="local training in a round, without momentum")

    @model_validator(mode="after")
    def _plain(self) -> Self:
        if self.local.momentum:
            raise ValueError(
                f"local.momentum: found {self.local.momentum:g}; allowed: 0, with which the mean step of a visit is "
                "the mean gradient that a client keeps"
            )
        return self


class ModelAndControl(Message):
    """Opening of training: w and c."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]
    c: Tensor = broadcast(Quantity.GRADIENT)  # [d]


class ControlledUpdate(Message):
    """Result of local training, and the change of c_i."""

    delta_theta: Tensor = rows(Quantity.MODEL_UPDATE, "d")  # [c, d]
    steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64
    delta_c: Tensor = rows(Quantity.GRADIENT, "d")  # [c, d]


SCAFFOLD = base.Algorithm(
    name="scaffold",
    version=1,
    settings=ScaffoldSettings,
    server=ScaffoldServer,
    client=ScaffoldClient,
    check_model=base.no_batch_norm("scaffold"),
    messages=(ModelAndControl, ControlledUpdate, PersonalizeRequest),
    needs_classes=False,
    titles=lambda settings: {"personal": "SCAFFOLD + fine-tuning", "global": "SCAFFOLD"},
    requires_fixed_population=lambda settings: (
        "name",
        "found scaffold, whose control variate is a mean over a fixed roster",
        "fedavg, fedprox",
    ),
)
