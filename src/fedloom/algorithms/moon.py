"""MOON: FedAvg that pulls clients' features towards the shared model's, and away from their previous model's.

Q. Li, B. He, D. Song, Model-contrastive federated learning, CVPR 2021, arXiv 2103.16257, Algorithm 1. A client adds to
its loss, for each example, μ times the cross-entropy of distinguishing the shared model's features from those of its
own model at its last visit, by their cosine similarities to the features in training (eq. 3). The features are the
inputs of the last linear layer: there is no projection head. Line numbers refer to docs/algorithms/moon.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.client import Trained, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg, FedAvgSettings
from fedloom.models.flat import DerivedModel, FlatModel, Leaves, with_forward


class MOONSettings(FedAvgSettings):
    """Keys of ``algorithm`` for MOON."""

    mu: float = Field(default=1.0, ge=0, description="μ, weight of the contrastive loss; 0 is FedAvg")
    temperature: float = Field(default=0.5, gt=0, description="τ, the divisor of cosine similarities")


class ModelContrastiveFL(FedAvg):
    """FedAvg with a model-contrastive loss."""

    name = "moon"
    settings = MOONSettings
    needs = ("features", "head")
    predictors = {"personal": "MOON + fine-tuning", "global": "MOON"}
    stateful = True
    no_example_privacy = None  # the contrastive loss is one of each example, between models made by noisy steps

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: MOONSettings) -> Trained:
        """Perform lines 2-4; at a client's first visit both frozen models are w_t, and the term has no gradient."""
        start = torch.cat([theta, theta, group.load_state("theta", theta)], dim=1)  # line 2
        trained = train(Contrasting(model, s), group, start, s.local, only="body")  # line 3
        own = trained.theta[:, : theta.shape[1]]
        group.save_state(theta=own)  # line 4
        return trained.part(own)


FROZEN = "frozen tensors"
"""Beginning of the names of frozen tensors; a layer's name has no space."""


FEATURES = "features of the batch"
"""Name under which the features of a batch pass from the loss to the last layer."""


class Anchored(DerivedModel):
    """Model with frozen tensors behind its parameters, and a term on its features that depends on them.

    θ consists of the model's θ and the frozen tensors, in this order. These take the head's place in the layout, so
    that training the body leaves them unchanged. A subclass defines :meth:`term`.
    """

    def __init__(self, model: FlatModel, frozen: Mapping[str, tuple[int, ...]]) -> None:
        entries = tuple((f"{FROZEN}.{name}", shape) for name, shape in frozen.items())
        layout = replace(model.layout, entries=(*model.layout.entries, *entries), headless=False, last=FROZEN)
        super().__init__(model, layout)
        self.predicting = model  # stays in evaluation mode

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the model's outputs, from the features among the parameters if its last layer is linear."""
        if FEATURES in parameters and self.model.layout.head_is_linear:
            return F.linear(parameters[FEATURES], *(parameters[name] for name in self.model.layout.head))
        return self.model.forward(parameters, x)

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Return the sum of the model's own loss and the term, ``[b]``."""
        buffers = parameters.buffers if isinstance(parameters, Leaves) else {}
        once = self.model.layout.head_is_linear  # else the model is called twice, and its buffers move once
        z = self.model.features(parameters if once else Leaves(parameters, _copied(buffers)), x)
        own = with_forward(self.model, self.forward) if once else self.model
        return own.loss(Leaves({**parameters, FEATURES: z}, buffers), x, y) + self.term(parameters, z.flatten(1), x, y)

    @abstractmethod
    def term(self, parameters: Mapping[str, Tensor], z: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
        """Return the added loss of examples with features ``[b, f]``, ``[b]``."""


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


class Contrasting(Anchored):
    """Model whose features are compared with those of two frozen models, w_t and w_i of the last visit."""

    def __init__(self, model: FlatModel, s: MOONSettings) -> None:
        shapes = dict(model.layout.entries)
        super().__init__(model, {f"{source}.{name}": shapes[name] for source in ("shared", "last") for name in shapes})
        self.mu, self.temperature = s.mu, s.temperature

    def term(self, parameters: Mapping[str, Tensor], z: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
        """Return μ ℓ_con (eq. 3) of each example."""
        del y
        similarities = torch.stack(
            [F.cosine_similarity(z, self._frozen(parameters, source, x), dim=1) for source in ("shared", "last")], dim=1
        )
        return -self.mu * F.log_softmax(similarities / self.temperature, dim=1)[:, 0]

    def _frozen(self, parameters: Mapping[str, Tensor], source: str, x: Tensor) -> Tensor:
        own = {name: parameters[f"{FROZEN}.{source}.{name}"].detach() for name, _ in self.predicting.layout.entries}
        return self.predicting.features(own, x).flatten(1)


MOON = ModelContrastiveFL()
