"""HeurFedAMP: each client is pulled towards a mean of all clients' models that favors similar ones.

Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang, Personalized cross-silo federated learning on non-IID
data, AAAI 2021, arXiv 2007.03797, §4 and Algorithm 1. The server keeps each client's last model w_i. It sends client i
u_i = Σ_j ξ_ij w_j, with weights from cosines, and the client minimizes f_i(w) + λ/2 ‖w - u_i‖² from u_i.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Conversation, Round, Setup, conversation
from fedloom.algorithms.client import Correction, adapt, proximal, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Update
from fedloom.algorithms.local_sgd import LocalSGD, check_overshoot
from fedloom.core.settings import Settings
from fedloom.messages import Message, Quantity, Replies, rows
from fedloom.models.predictors import Predictors, predictors_of


def attention(models: Tensor, i: int, self_weight: float, sigma: float) -> Tensor:
    """Return ξ_i1 ... ξ_in of client i ``[n]`` float64 among models ``[n, d]``; they sum to 1 (eq. 9).

    ξ_ii is ``self_weight``; the others share the rest in proportion to exp(σ cos(w_i, w_j)). A lone model gets all.
    """
    own = torch.arange(len(models)) == i
    if len(models) == 1:
        return own.double()
    w = models.double()
    cosines = (w @ w[i]) / (w.norm(dim=1) * w[i].norm()).clamp(min=torch.finfo(torch.float64).tiny)
    others = torch.softmax((sigma * cosines).masked_fill(own, -torch.inf), dim=0)
    return torch.where(own, self_weight, (1 - self_weight) * others)


class HeurFedAMPServer(base.ServerAlgorithm):
    """Server that keeps every client's last model; a client never counted has the initial one, ignored by others."""

    def __init__(self, settings: HeurFedAMPSettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        self.sizes["s"] = setup.model.layout.size
        theta, n = setup.model.init(generator, setup.dtype), len(setup.roster)
        self.state = {"models": theta.repeat(n, 1), "counted": torch.zeros(n, dtype=torch.long)}

    def train_round(self, round: Round) -> base.Statistics:
        """Perform lines 2-5 for the cohort."""
        cohort, models, counted = round.sample(), self.state["models"], self.state["counted"]
        rows = torch.tensor([self.setup.rows[client] for client in cohort.clients])
        u = torch.stack([self._centre(i) for i in rows.tolist()])  # line 3
        updates = cohort.send(Centre(u), Update)  # line 4
        present_rows = rows[updates.present]
        self.state = {"models": models.clone(), "counted": counted.clone()}
        self.state["models"][present_rows] = (u + updates.delta_theta)[updates.present]
        self.state["counted"][present_rows] = 1
        return base.statistics_of(updates)

    def _centre(self, i: int) -> Tensor:
        """Return u_i ``[d]``: the mean of the client's own model and those of counted clients."""
        counted = self.state["counted"].bool()
        counted[i] = True
        models = self.state["models"][counted]
        layout = self.setup.model.layout
        compared = models[:, ~layout.mask(layout.buffers)] if layout.buffers else models
        weights = attention(compared, int(counted[:i].sum()), self.settings.self_weight, self.settings.sigma)
        total = torch.zeros_like(models[0])
        for model, weight in zip(models, weights.tolist(), strict=True):
            if weight:
                total.add_(model, alpha=weight)
        return total

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send each client its model; a client never counted gets the mean of those counted and trains (ours)."""
        models, counted = self.state["models"], self.state["counted"].bool()
        mean = models[counted].mean(0) if counted.any() else models[0]
        places = [self.setup.known_row(client) for client in cohort.clients]
        own = [i is not None and bool(counted[i]) for i in places]
        theta = torch.stack([models[i] if mine else mean for i, mine in zip(places, own, strict=True)])
        return cohort.send(ClientModel(theta, torch.tensor([[float(not mine)] for mine in own]).double()))


class HeurFedAMPClient(base.ClientAlgorithm):
    """Client that trains in the proximity of the model it receives."""

    @conversation
    def train(self, clients: ClientGroup, opening: Centre) -> Conversation:
        """Minimize f_i(w) + λ/2 ‖w - u_i‖² from u_i (line 4)."""
        s = self.settings
        trained = train(self.setup.model, clients, opening.theta, s.local, correct=s.pull)
        yield Update(trained.theta - opening.theta, trained.steps, trained.loss)
        return None

    @conversation
    def personalize(self, clients: ClientGroup, opening: ClientModel) -> Predictors:
        """Return ``personal``, the client's model; a new client makes one visit's steps from the mean."""
        s, theta = self.settings, opening.theta
        new = opening.new[:, 0].nonzero().flatten().tolist()
        theta = adapt(self.setup.model, clients, theta, s.local, new, correct=s.pull, purpose="personalize")
        return predictors_of(self.setup.model, personal=theta)


class HeurFedAMPSettings(Settings):
    """Keys of ``algorithm`` for HeurFedAMP."""

    self_weight: float = Field(default=0.5, ge=0, le=1, description="ξ_ii, the share of a client's own model in u_i")
    sigma: float = Field(default=25.0, ge=0, description="σ, weight of similarity; 0 weights all other models equally")
    proximity: float = Field(default=1e-4, ge=0, description="λ of λ/2 ‖w - u_i‖², the paper's λ/α_k")
    local: LocalSGD = Field(default=LocalSGD(steps=50), description="local training in a round")

    @model_validator(mode="after")
    def _check_stability(self) -> Self:
        check_overshoot("proximity", self.proximity, "local.lr", self.local.lr)
        return self

    @property
    def adaptation(self) -> LocalSGD:
        """Training of a client without a model."""
        return self.local

    @property
    def pull(self) -> Correction | None:
        """Gradient of the proximal term; None without one."""
        return proximal(self.proximity) if self.proximity else None


class Centre(Message):
    """Opening of training: u_i."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d]


class ClientModel(Message):
    """Opening of personalization: w_i, or the starting point of a client without a model."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d]
    new: Tensor = rows(Quantity.COUNT)  # [c, 1] float64, 1 for a client without a model


class HeurFedAMP(base.Algorithm):
    """Personal models, each pulled towards similar ones."""

    name = "heurfedamp"
    no_sums = "compares each client's own model with every other at the server"
    settings = HeurFedAMPSettings
    example = {"proximity": 0.5}
    server = HeurFedAMPServer
    client = HeurFedAMPClient
    messages = (Centre, Update, ClientModel)
    predictors = {"personal": "HeurFedAMP"}
    roster_data = "a model of each client"
    no_example_privacy = None  # the proximal term does not depend on data
    noisy_training = ("local",)


HEURFEDAMP = HeurFedAMP()
