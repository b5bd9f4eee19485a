"""pFedHN: the server embeds each client, and a hypernetwork turns the embedding into the client's model.

A. Shamsian, A. Navon, E. Fetaya, G. Chechik, Personalized federated learning using hypernetworks, ICML 2021,
arXiv 2103.04628, Algorithm 1. Only models and their updates are sent. The authors draw one client per round; with
several, the hypernetwork gets the mean gradient and each embedding its own client's. An unseen client gets its model
through exchanges that optimize a fresh embedding, the hypernetwork frozen (J. Scott et al., papers/001, §4). Line
numbers refer to docs/algorithms/pfedhn.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Conversation, Round, Setup, conversation
from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Update
from fedloom.algorithms.local_sgd import LocalSGD, check_overshoot
from fedloom.algorithms.optimizers import MomentumAscent
from fedloom.algorithms.pefll import prefixed, under
from fedloom.core.settings import Settings
from fedloom.messages import Message, Quantity, Replies, rows
from fedloom.models.hypernetwork import Hypernetwork
from fedloom.models.predictors import Predictors, predictors_of
from fedloom.privacy.examples import NoisySteps


class PFedHNServer(base.ServerAlgorithm):
    """Server that owns the hypernetwork and a table of embeddings [n + 1, l], whose last row starts unknown clients."""

    settings: PFedHNSettings

    def __init__(self, settings: PFedHNSettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        size = settings.embedding_size or 1 + setup.clients // 4
        self.hypernetwork = Hypernetwork(size, self.sizes["d"], settings.hypernetwork, output_relu=False)
        weights = self.hypernetwork.layout.split(self.hypernetwork.init(generator, setup.dtype))
        if settings.start == "model":
            weights = self.hypernetwork.started_at(setup.model.init(generator, setup.dtype), weights)
        table = torch.randn(len(setup.roster) + 1, size, generator=generator, dtype=torch.float64).to(setup.dtype)
        self.optimizer = settings.optimizer(settings.server_lr)
        self.descent = settings.optimizer(settings.embedding_lr or settings.server_lr)
        self.sizes["s"] = self.sizes["d"]
        self.state = {
            "embeddings": table,
            "embeddings.momentum": torch.zeros_like(table),
            **prefixed("h", weights),
            **prefixed("step", self.optimizer.start(list(weights.values()))),
        }

    def train_round(self, round: Round) -> base.Statistics:
        """Perform lines 1-6."""
        cohort = round.sample()  # line 1
        mine = torch.tensor([self.setup.rows[client] for client in cohort.clients])
        theta, pullback = self.hypernetwork.vjp(under("h", self.state), self.state["embeddings"][mine])  # line 2
        updates = cohort.send(PFedHNTrainRequest(theta), Update)  # lines 2-3
        back = pullback(updates.delta_theta, updates.mean_weights)
        d_h = list(back.d_eta_h().values())
        factor = self._factor(torch.stack([*torch._foreach_norm(d_h), back.d_v.norm()]).norm())  # line 4
        new = {name: tensor.clone() for name, tensor in self.state.items()}
        self.optimizer.apply(list(under("h", new).values()), d_h, under("step", new), factor)  # line 5
        e, momentum = new["embeddings"][mine], new["embeddings.momentum"][mine]
        self.descent.apply([e], [back.d_v], {"0.momentum": momentum}, factor)  # line 6
        is_present = updates.present  # the other rows, and their momentum, do not change
        new["embeddings"][mine[is_present]], new["embeddings.momentum"][mine[is_present]] = (
            e[is_present],
            momentum[is_present],
        )
        self.state.update(new)
        return base.statistics_of(updates)

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Make the models of known clients, and search for the embeddings of the others."""
        places = [self.setup.known_row(client) for client in cohort.clients]
        new = torch.tensor([place is None for place in places])[:, None]
        e = self.state["embeddings"][[len(self.setup.roster) if place is None else place for place in places]]
        momentum, h = torch.zeros_like(e), under("h", self.state)
        for _ in range(self.settings.personalize_exchanges if new.any() else 0):
            theta, pullback = self.hypernetwork.vjp(h, e)  # line 2, for a new client
            updates = cohort.send(TrialModel(theta, new.double()), Update)  # line 3
            d_e = pullback(updates.delta_theta, updates.mean_weights).d_v
            d_e = torch.stack([row * self._factor(row.norm()) for row in d_e])  # line 4, each client's own gradient
            embeddings = e.clone()
            self.descent.apply([embeddings], [d_e], {"0.momentum": momentum}, 1.0)  # line 6
            e = torch.where(new, embeddings, e)
        return cohort.send(GeneratedModel(self.hypernetwork(h, e)))

    def _factor(self, norm: Tensor) -> float:
        return min(1.0, self.settings.clip / (float(norm) + 1e-6))


class PFedHNClient(base.ClientAlgorithm):
    """Client that trains the models it receives."""

    settings: PFedHNSettings
    personalizing = ("personalize", "search")

    @conversation
    def train(self, clients: ClientGroup, opening: PFedHNTrainRequest) -> Conversation:
        """Perform line 3."""
        yield self._update(clients, opening.theta, list(range(len(clients))), "train")
        return None

    @conversation
    def search(self, clients: ClientGroup, opening: TrialModel) -> Conversation:
        """Train from each model received, and keep the last one untrained. Known clients do nothing."""
        new, exchange = opening.new[:, 0].nonzero()[:, 0].tolist(), 0
        message: TrialModel | GeneratedModel = opening
        while isinstance(message, TrialModel):
            message = yield self._update(clients, message.theta, new, f"search-{exchange}")
            exchange += 1
        return self.personalize(clients, message)

    @conversation
    def personalize(self, clients: ClientGroup, opening: GeneratedModel) -> Predictors:
        """Return the received model as ``personal``."""
        return predictors_of(self.setup.model, personal=opening.theta)

    def _update(self, clients: ClientGroup, theta: Tensor, members: list[int], purpose: str) -> Update:
        delta, numbers = torch.zeros_like(theta), torch.zeros(len(clients), 1, dtype=torch.float64)
        steps, loss = numbers, numbers.clone()
        if members:
            s, model = self.settings.local, self.setup.model
            trained = train(model, clients, theta[members], s, members=members, purpose=purpose, at_home=False)
            delta[members] = trained.theta - theta[members]
            steps[members], loss[members] = trained.steps, trained.loss
        return Update(delta, steps, loss)

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """Return the steps of a new client."""
        return self.settings.personalize_exchanges * self.settings.local.count(examples)


class PFedHNSettings(Settings):
    """Keys of ``algorithm`` for pFedHN; defaults are those of the authors' code."""

    local: LocalSGD = Field(
        default=LocalSGD(steps=50, batch_size=64, lr=5e-3, lambda_theta=2.5e-5), description="local training in a visit"
    )
    embedding_size: int | None = Field(default=None, ge=1, description="l; null is 1 + n // 4 for n clients")
    hypernetwork: Literal["S", "M", "L"] = Field(default="M", description="1, 3 or 5 hidden layers of 100")
    start: Literal["drawn", "model"] = Field(
        default="drawn",
        description="model: the output layer starts with weights 0 and biases θ₀, the model's own initialization, so "
        "every client starts from θ₀, as adapters of a pretrained model need; drawn: at random",
    )
    server_lr: float = Field(default=1e-2, gt=0, description="learning rate of the hypernetwork")
    embedding_lr: float | None = Field(
        default=None, gt=0, description="learning rate of the embeddings; null: server_lr"
    )
    server_momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of both, kept for each embedding")
    server_decay: float = Field(
        default=1e-3, ge=0, description="weight decay of the hypernetwork and of the embeddings"
    )
    clip: float = Field(default=50.0, gt=0, description="largest norm of the server's gradient")
    personalize_exchanges: int = Field(
        default=20, ge=0, description="exchanges that find the embedding of a new client"
    )

    @model_validator(mode="after")
    def _shrinking(self) -> Self:
        for key, rate in (("server_lr", self.server_lr), ("embedding_lr", self.embedding_lr or 0.0)):
            check_overshoot(key, rate, "server_decay", self.server_decay)
        return self

    def optimizer(self, lr: float) -> MomentumAscent:
        """Return the server's optimizer with this rate."""
        return MomentumAscent(lr, self.server_momentum, self.server_decay)


class PFedHNTrainRequest(Message):
    """Opening of training (line 2)."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d]


class TrialModel(Message):
    """Opening of the search for an embedding, and each later step of it."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d]
    new: Tensor = rows(Quantity.OTHER)  # [c, 1] float64, 1 for clients that train


class GeneratedModel(Message):
    """Opening or end of personalization: h(e_i)."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d]


class PFedHN(base.Algorithm):
    """Hypernetwork on the server, with an embedding of each client."""

    name = "pfedhn"
    no_sums = "needs each client's own update at the server, whose hypernetwork learns from it"
    settings = PFedHNSettings
    example = {"embedding_lr": 0.05, "personalize_exchanges": 2}
    needs = ("any vector",)
    server = PFedHNServer
    client = PFedHNClient
    messages = (PFedHNTrainRequest, TrialModel, GeneratedModel, Update)
    predictors = {"personal": "pFedHN"}
    roster_data = "an embedding of each client"
    no_example_privacy = None  # clients send the results of noisy steps, also in the search for an embedding

    def noisy_steps(self, settings: Any, examples: int, *, personalizing: bool = False) -> tuple[NoisySteps, ...]:
        """Return the steps of ``local``, and in a search for an embedding those of each of its exchanges."""
        steps = settings.local.noisy(examples)
        return (replace(steps, count=steps.count * settings.personalize_exchanges) if personalizing else steps,)


PFEDHN = PFedHN()
