"""FedProto: each client trains its own model, and shares only prototypes, the mean features of each class.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, FedProto: federated prototype learning across
heterogeneous clients, AAAI 2022, arXiv 2105.00243, Algorithm 1. A client trains its model on its loss, plus λ times the
mean squared distance of each example's features from the global prototype of its class, and answers with the features
of its examples, summed by class. The server makes their means (eq. 6). A client predicts the class of the nearest
global prototype (eq. 8). Models never travel; they start alike, from a seed that the server draws. Line numbers refer
to docs/algorithms/fedproto.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Conversation, Round, Setup, conversation
from fedloom.algorithms.batches import PIECE, train_examples
from fedloom.algorithms.client import Trained, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.moon import FROZEN, Anchored
from fedloom.algorithms.sums import Summed, SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.data.federated import ClientData
from fedloom.data.inputs import pieces
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.flat import FlatModel
from fedloom.models.predictors import Predictors, predictors_of

LEAST_COUNT = 0.5
"""Sum of weights of a class below which no client has it: sums of counts may have noise, or be rounded."""

IMPOSSIBLE = -1e6
"""Logit of a class without a prototype."""


class PrototypeTrainRequest(Message):
    """Opening of training: global prototypes, the classes that have one, and the seed of a new model."""

    prototypes: Tensor = broadcast(Quantity.DESCRIPTOR)  # [C, f]
    known: Tensor = broadcast(Quantity.COUNT)  # [C] float64, 0 or 1
    seed: Tensor = broadcast(Quantity.COUNT)  # [1] float64


class PrototypeUpdate(Message):
    """Numerators and denominators of the global prototypes: a client's prototypes times weights, and the weights."""

    sums: Tensor = rows(Quantity.DESCRIPTOR, "C", "f")  # [c, C, f]
    counts: Tensor = rows(Quantity.COUNT, "C")  # [c, C] float64
    steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64


class PrototypePersonalizeRequest(PrototypeTrainRequest):
    """Opening of personalization: the same as that of training."""


class FedProtoServer(base.ServerAlgorithm):
    """Server that keeps the global prototypes."""

    def __init__(self, settings: FedProtoSettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        layout = setup.model.layout
        self.sizes |= {"C": setup.classes, "f": dict(layout.entries)[layout.head[0]][1]}
        self.state = {
            "prototypes": torch.zeros(self.sizes["C"], self.sizes["f"], dtype=setup.dtype),
            "known": torch.zeros(setup.classes, dtype=torch.float64),
            "seed": torch.randint(2**31, (1,), generator=generator).double(),
        }

    def update_bounds(self, examples: int) -> Mapping[str, float]:
        """Return the bounds of the counts."""
        most = examples if self.settings.weighting == "examples" else 1
        return {"steps": self.settings.local.count(examples), "counts": most}

    def train_round(self, round: Round) -> base.Statistics:
        """Perform lines 1 and 7; a class that no answer has keeps its prototype."""
        updates = round.sample().send(PrototypeTrainRequest(**self.state), PrototypeUpdate)
        sums, total = updates.sum(updates.sums), updates.sum(updates.counts)
        has_examples = total > LEAST_COUNT
        sums = (
            sums * has_examples[:, None] if updates.is_noisy else sums
        )  # a class that no client has would only add noise
        unchanged = self.state["prototypes"] * ~has_examples[:, None]
        self.state["prototypes"] = (sums + unchanged) / torch.where(has_examples, total, 1).to(sums)[:, None]
        self.state["known"] = torch.maximum(self.state["known"], has_examples.double())
        return base.statistics_of(updates) | {"classes": float(self.state["known"].sum())}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the prototypes."""
        return cohort.send(PrototypePersonalizeRequest(**self.state))


class FedProtoClient(base.ClientAlgorithm):
    """Client that keeps its model."""

    settings: FedProtoSettings
    stateful = True

    @conversation
    def train(self, clients: ClientGroup, opening: PrototypeTrainRequest) -> Conversation:
        """Perform lines 2-6."""
        s, model = self.settings, self.setup.model
        trained = near_prototypes(model, clients, self._own(clients, opening), opening, s, s.local)
        clients.save_state(theta=trained.theta)  # line 5
        prototype_sums = [class_sums(model, row, c) for row, c in zip(trained.theta, clients.clients, strict=True)]
        sums, counts = (torch.stack(each) for each in zip(*prototype_sums, strict=True))
        if s.weighting == "uniform":
            sums, counts = sums / counts.clamp(min=1).to(sums)[:, :, None], counts.clamp(max=1)
        yield PrototypeUpdate(sums, counts, trained.steps, trained.loss)  # line 6
        return None

    @conversation
    def personalize(self, clients: ClientGroup, opening: PrototypePersonalizeRequest) -> Predictors:
        """Return each client's model (line 8); a new client trains one (line 9)."""
        s, model, new = self.settings, self.setup.model, clients.new
        theta = self._own(clients, opening)
        if new and s.personalize_steps:
            sgd = s.local.with_steps(steps=s.personalize_steps)
            theta[new] = near_prototypes(model, clients, theta[new], opening, s, sgd, new, "personalize").theta
        if s.predict == "prototypes" and bool(opening.known.any()):
            theta = nearest(model, theta, opening)
        return predictors_of(model, personal=theta)

    def _own(self, clients: ClientGroup, opening: PrototypeTrainRequest) -> Tensor:
        """Return the clients' kept models ``[g, d]``; a new client's starts from the server's seed, or its own."""
        members = range(len(clients))
        if self.settings.start == "common":
            generators = [torch.Generator().manual_seed(int(opening.seed)) for _ in members]
        else:
            generators = [clients.generator(i, "init") for i in members]
        start = torch.stack([self.setup.model.init(generator, self.setup.dtype) for generator in generators])
        return clients.load_state("theta", start.to(opening.prototypes.device))


class NearPrototypes(Anchored):
    """Model with the global prototypes, and a penalty on the distance of features from them."""

    def __init__(self, model: FlatModel, opening: PrototypeTrainRequest, strength: float) -> None:
        classes, features = opening.prototypes.shape
        super().__init__(model, {"prototypes": (classes, features), "known": (classes,)})
        self.strength = strength

    def term(self, parameters: Mapping[str, Tensor], z: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
        """Return λ ‖z - C_y‖²/f of each example, 0 for classes without a prototype (eq. 7)."""
        del x
        prototypes, known = parameters[f"{FROZEN}.prototypes"].detach(), parameters[f"{FROZEN}.known"].detach()
        return self.strength * known[y] * (z - prototypes[y]).square().mean(1)


def near_prototypes(
    model: FlatModel,
    group: ClientGroup,
    theta: Tensor,
    opening: PrototypeTrainRequest,
    s: FedProtoSettings,
    sgd: LocalSGD,
    members: list[int] | None = None,
    purpose: str = "train",
) -> Trained:
    """Train models ``[g, d]`` near the global prototypes (lines 3-4)."""
    frozen = torch.cat([opening.prototypes.flatten(), opening.known.to(theta)]).expand(len(theta), -1)
    start, d = torch.cat([theta, frozen], dim=1), theta.shape[1]
    anchored = NearPrototypes(model, opening, s.strength)
    trained = train(anchored, group, start, sgd, only="body", members=members, purpose=purpose)
    return trained.part(trained.theta[:, :d])


@torch.no_grad()
def class_sums(model: FlatModel, theta: Tensor, client: ClientData) -> tuple[Tensor, Tensor]:
    """Return sums over the train examples of each class: of features ``[C, f]``, and of 1 ``[C]`` float64 (eq. 3)."""
    split, leaves = train_examples(client, labelled=True), model.layout.leaves(theta)
    assert split.y is not None
    z = torch.cat([model.features(leaves, piece).flatten(1) for piece in pieces(split.x, PIECE)])
    one_hot = F.one_hot(split.y, client.classes)
    return one_hot.to(z).T @ z, one_hot.sum(0).double()


def nearest(model: FlatModel, theta: Tensor, opening: PrototypeTrainRequest) -> Tensor:
    """Return θ ``[g, d]`` whose head has the logits -‖z - C_j‖²/2, up to a constant that all classes share (eq. 8)."""
    prototypes = opening.prototypes
    bias = torch.where(opening.known > 0, -prototypes.square().sum(1) / 2, IMPOSSIBLE)
    head = torch.cat([prototypes.flatten(), bias.to(prototypes)])
    return torch.cat([theta[:, : model.layout.body_size], head.expand(len(theta), -1)], dim=1)


class FedProtoSettings(Settings):
    """Keys of ``algorithm`` for FedProto."""

    strength: float = Field(default=1.0, ge=0, description="λ, weight of the distance of features from prototypes")
    weighting: Literal["examples", "uniform"] = Field(
        default="examples", description="average prototypes by a client's examples of the class, or uniformly"
    )
    predict: Literal["prototypes", "head"] = Field(
        default="prototypes", description="predict the class of the nearest global prototype, or by the client's head"
    )
    start: Literal["common", "own"] = Field(
        default="common", description="common: the clients' models start alike; own: each from its own draw"
    )
    local: LocalSGD = Field(default=LocalSGD(steps=50), description="local training in a round")
    personalize_steps: int = Field(
        default=50, ge=0, description="local SGD steps, as in a round, that train a model for a client without one"
    )


class FedProto(base.Algorithm):
    """Models of clients' own, and shared prototypes."""

    name = "fedproto"
    settings = FedProtoSettings
    server = FedProtoServer
    client = FedProtoClient
    messages = (PrototypeTrainRequest, PrototypeUpdate, PrototypePersonalizeRequest)
    tasks = ("classification",)
    restriction = "Its prototypes are means of features by class."
    needs = ("labels", "head", "linear head", "features")
    predictors = {"personal": "FedProto"}
    no_example_privacy = "Prototypes are means of a client's features, which have no noise."

    def sums(self, settings: Any) -> SummedFields:
        """Return the sums of the prototypes and of the counts; the server divides the former by the latter."""
        return sums_of(PrototypeUpdate, counts=Summed(learned=True))

    def check_model(self, settings: Any, model: FlatModel) -> None:
        """Check the needs; a head of prototypes also needs a bias."""
        super().check_model(settings, model)
        if settings.predict == "prototypes" and len(model.layout.head) < 2:
            raise ExperimentError(
                f"algorithm.predict: prototypes needs a last linear layer with a bias, and {model.layout.head[0]} of "
                "this model has none; add one, or predict by the head",
                key="algorithm.predict",
            )


FEDPROTO = FedProto()
