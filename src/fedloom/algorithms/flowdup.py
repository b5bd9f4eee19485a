"""FLowDUP: networks that make a client's model, in a random subspace, from its unlabelled inputs.

H. Zakerinia, J. Scott, C. H. Lampert, Federated learning with unlabeled clients: personalization can happen in low
dimensions, PMLR 306, 2026, arXiv 2505.15579. A client's model is θ = θ₀ + P v, v = h₂(mean over its inputs x of h₁(x)),
with P fixed (:mod:`fedloom.models.subspace`), and θ₀ fixed or trained. The shared vector ψ = (h₁, h₂, c) has a
learnable centre c, and θ₀ if that is trained. Clients train ψ on

    [labelled] mean over a batch of the loss at θ + λ ‖v - c‖²

and the server averages, as in FedAvg, so it needs only sums. Unlabelled clients have only the second term. A new client
makes its model itself, by one forward pass of its inputs. Only the paper's abstract was available, which leaves open
the choice of θ₀, the form of the regularizer (here the squared distance, as in the divergence of two Gaussians of equal
variance), its factor, the sizes, the distribution of P, and the inputs of v in training (here the step's mini-batch);
each is a key, or listed in docs/algorithms/flowdup.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import visible_examples
from fedloom.algorithms.client import Trained, adapt, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg, FedAvgSettings
from fedloom.algorithms.pefll import network_for, under
from fedloom.core.keyed import make_rng, shuffled
from fedloom.data.federated import ClientData
from fedloom.data.inputs import count
from fedloom.errors import ExperimentError
from fedloom.models.embedding import EmbeddingNetwork, EmbeddingSettings
from fedloom.models.flat import DerivedModel, FlatModel, Layout
from fedloom.models.hypernetwork import Hypernetwork, HypernetworkShape
from fedloom.models.predictors import Predictors, predictors_of
from fedloom.models.subspace import Subspace, SubspaceSettings


class OriginSettings(SubspaceSettings):
    """Settings of the subspace θ₀ + P v, and of its origin."""

    origin: Literal["fixed", "trained", "model"] = Field(
        default="fixed",
        description="θ₀. fixed: the model's initialization, drawn from the run's seed and never sent; trained: it "
        "starts there, and is sent, trained and averaged like the networks; model: fixed at the parameters that a "
        "pretrained model brings, and refused for a model whose weights are drawn",
    )

    def check(self, model: FlatModel, key: str) -> None:
        """Check the size, and that a model from which θ₀ is to come has weights of its own.

        Raise ExperimentError if it has not; the message begins with the ``key`` of these settings.
        """
        super().check(model, key)
        if self.origin != "model":
            return
        one, other = (model.layout.split(model.init(torch.Generator().manual_seed(seed))) for seed in (0, 1))
        if not any(len(shape) > 1 and torch.equal(one[name], other[name]) for name, shape in model.layout.entries):
            raise ExperimentError(
                f"{key}.origin: model needs a pretrained model, but the weights of this model are drawn for each run; "
                "choose fixed or trained",
                key=f"{key}.origin",
                found="model",
                allowed=["fixed", "trained"],
            )


class FLowDUPSettings(FedAvgSettings):
    """Keys of ``algorithm`` for FLowDUP."""

    subspace: OriginSettings = Field(default=OriginSettings(), description="the models θ₀ + P v that can be made")
    coordinates: Literal["generated", "shared"] = Field(
        default="generated",
        description="v. generated: h₂ makes it from the client's inputs; shared: it is c for every client, without "
        "networks: FedAvg in the subspace, a control",
    )
    embedding: EmbeddingSettings = Field(default=EmbeddingSettings(labels=False), description="the network h₁")
    embedding_size: int = Field(default=32, ge=1, description="length of the outputs of h₁, and of their mean")
    hypernetwork: HypernetworkShape = Field(default=HypernetworkShape(size="S"), description="the network h₂")
    lambda_centre: float = Field(default=1e-3, ge=0, description="λ of the regularizer λ‖v - c‖²")
    unlabelled: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="fraction of the seen clients, rounded down, whose labels a simulation hides from them",
    )
    personalize_steps: int = Field(
        default=0, ge=0, description="local SGD steps of clients with labels on their generated models"
    )

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if self.local.mask_absent:
            raise ValueError("local.mask_absent: set it to false, because clients may have no labels to mask by")
        if self.unlabelled and self.embedding.labels:
            raise ValueError(
                "unlabelled: clients without labels need embedding.labels: false; set unlabelled to 0, or that key to "
                f"false (got {self.unlabelled:g})"
            )
        return self


class FLowDUP(FedAvg):
    """Networks that make models from unlabelled inputs, trained by clients and averaged."""

    name = "flowdup"
    settings = FLowDUPSettings
    example = {
        "embedding": {"network": "mlp", "width": 6, "labels": False},
        "subspace": {"size": 11},
        "lambda_centre": 0.1,
        "unlabelled": 0.4,
    }
    needs = ("any vector", "no buffers")
    keeps_buffers = False
    predictors = {"personal": "FLowDUP"}
    no_example_privacy = (
        "All examples of a batch make one model together, so no example's part of a gradient can be clipped."
    )

    def generating(self, s: FLowDUPSettings, setup: Setup) -> Setup:
        """Return the setup with the generator, whose vector is ψ, in place of the model."""
        order = shuffled(make_rng(setup.seed, "flowdup", "unlabelled"), len(setup.roster))
        hidden = order[: math.floor(s.unlabelled * len(order) + 1e-9)] if setup.same_clients else ()
        generator = SubspaceGenerator(
            setup.model,
            network_for(setup, s.embedding, s.embedding_size),
            s.hypernetwork.network(s.embedding_size, s.subspace.dimension(setup.model)),
            s.subspace.of(setup.model, setup.seed, setup.dtype),
            strength=s.lambda_centre,
            hidden=frozenset(setup.roster[i] for i in hidden),
            at_origin=s.hypernetwork.start == "model",
            trains_origin=s.subspace.origin == "trained",
            shares=s.coordinates == "shared",
        )
        return replace(setup, model=generator)

    def server(self, settings: Any, setup: Setup, generator: torch.Generator) -> base.ServerAlgorithm:
        """Return the server of FedAvg, for ψ."""
        return super().server(settings, self.generating(settings, setup), generator)

    def client(self, settings: Any, setup: Setup) -> base.ClientAlgorithm:
        """Return the client of FedAvg, for ψ."""
        return super().client(settings, self.generating(settings, setup))

    def train(self, model: Any, group: ClientGroup, shared: Tensor, s: FLowDUPSettings) -> Trained:
        """Train ψ on both terms, or on the regularizer; clients with the same terms and batch size train together."""
        kinds = [(model.uses_labels(c), min(s.local.batch_size, len(c.train))) for c in group.clients]
        together = [[i for i, other in enumerate(kinds) if other == kind] for kind in sorted(set(kinds))]
        parts = []
        for members in together:
            generator = model.for_training(labelled=kinds[members[0]][0], stacked=len(members) > 1)
            parts.append(train(generator, group, shared[members], s.local, members=members))
        back = torch.tensor([i for members in together for i in members]).argsort()
        return Trained.joined(parts).mapped(lambda rows: rows[back.to(rows.device)])

    def personalize(self, model: Any, group: ClientGroup, shared: Tensor, s: FLowDUPSettings) -> Predictors:
        """Let each client make its model from all of its train inputs, and train it further if it has labels."""
        with torch.no_grad():
            theta = torch.stack([model.made(psi, c) for c, psi in zip(group.clients, shared, strict=True)])
        able = [i for i, client in enumerate(group.clients) if model.uses_labels(client)]
        sgd = s.local.with_steps(steps=s.personalize_steps)
        theta = adapt(model.model, group, theta, sgd, able)
        return predictors_of(model.model, personal=theta)

    def titles(self, settings: Any) -> Mapping[str, str]:
        """Return the name of the predictor in tables."""
        name = "FLowDUP" if settings.coordinates == "generated" else "FedAvg in a subspace"
        return {"personal": f"{name} + fine-tuning" if settings.personalize_steps else name}

    def labelled(self, settings: Any) -> bool:
        """Return True if h₁ takes labels, or local steps use them."""
        return bool(settings.embedding.labels or settings.personalize_steps)

    def trains_unlabelled(self, settings: Any) -> bool:
        """Return True unless h₁ takes labels."""
        return not settings.embedding.labels

    def check_model(self, settings: Any, model: FlatModel) -> None:
        """Reject a network h₁ on labels where there are none, and a subspace larger than the model."""
        super().check_model(settings, model)
        settings.embedding.check(model)
        settings.subspace.check(model, "algorithm.subspace")

    def starts_alike(self, settings: Any) -> bool:
        """Return True if θ₀, the origin of the subspace, is not sent."""
        return bool(settings.subspace.origin != "trained")

    def requires_fixed_population(self, settings: Any) -> tuple[str, str] | None:
        """Return the reason if labels are to be hidden from a fraction of the clients."""
        if not settings.unlabelled:
            return None
        return (
            "unlabelled",
            "the fraction is drawn from a fixed roster; set it to 0, and pack unlabelled clients without targets",
        )


class SubspaceGenerator(DerivedModel):
    """Model with parameters ψ = (h₁, h₂, c): a batch makes θ = θ₀ + P h₂(mean h₁(x)), and the model at θ predicts it.

    ψ also has θ₀ if that is trained. If all clients share v, ψ has c, which is v then, and neither network.

    Parameters
    ----------
    model
        Model of θ.
    h1, h2
        Networks whose parameters are parts of ψ.
    subspace
        θ₀ and P.
    strength
        λ of the regularizer.
    hidden
        Ids of clients whose labels are hidden from them.
    at_origin
        True if ψ starts with v = 0 for every client, so that the first models are θ₀.
    trains_origin
        True if θ₀ is a part of ψ.
    shares
        True if v is c for every client.
    """

    def __init__(
        self,
        model: FlatModel,
        h1: EmbeddingNetwork,
        h2: Hypernetwork,
        subspace: Subspace,
        *,
        strength: float,
        hidden: frozenset[str],
        at_origin: bool = False,
        trains_origin: bool = False,
        shares: bool = False,
    ) -> None:
        parts = () if shares else (("h1", h1.layout.entries), ("h2", h2.layout.entries))
        entries = [(f"{part}.{name}", shape) for part, of_part in parts for name, shape in of_part]
        origin = [("origin", (model.layout.size,))] if trains_origin else []
        super().__init__(model, Layout((*entries, ("centre", (subspace.size,)), *origin), headless=True))
        self.needs_whole_batches = True  # v is a mean over the batch
        self.h1, self.h2, self.subspace, self.strength, self.hidden = h1, h2, subspace, strength, hidden
        self.at_origin, self.trains_origin, self.shares = at_origin, trains_origin, shares
        self.labelled, self.stacked = True, False

    def for_training(self, *, labelled: bool, stacked: bool) -> FlatModel:
        """Return the generator for clients with labels, or for clients whose loss is the regularizer alone.

        ``stacked`` generators train under :func:`torch.func.vmap`, which has no channels-last kernels.
        """
        view = copy.copy(self)
        view.labelled, view.stacked, view.needs_labels = labelled, stacked, labelled and self.needs_labels
        return view

    def init(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a first ψ: both networks drawn as usual, or with h₂ changed so that v is always 0; c = 0; and θ₀."""
        h1, h2 = (network.init(generator, dtype) for network in (self.h1, self.h2))
        centre = torch.zeros(self.subspace.size, dtype=dtype)
        if self.at_origin:
            h2 = self.h2.layout.join(self.h2.started_at(centre, self.h2.layout.split(h2)))
        origin = [self.subspace.origin.to(dtype)] if self.trains_origin else []
        return torch.cat([*(() if self.shares else (h1, h2)), centre, *origin])

    def coordinates(self, parameters: Mapping[str, Tensor], x: Any, y: Tensor | None) -> Tensor:
        """Return v = h₂(mean h₁(x)), ``[b, *input_shape] -> [k]``; or c, if all clients share it."""
        if self.shares:
            return parameters["centre"]
        descriptor = self.h1.describe(under("h1", parameters), x, y if self.h1.labels else None)
        return self.h2.forward(under("h2", parameters), descriptor)

    def generated(self, parameters: Mapping[str, Tensor], v: Tensor) -> dict[str, Tensor]:
        """Return the parameters of the model θ₀ + P v, in the memory layout in which the model runs fastest."""
        layout = self.model.layout
        leaves = layout.split(self.subspace.expand(v, parameters.get("origin")))
        if self.stacked or not layout.channels_last:
            return leaves
        return {n: p.clone(memory_format=torch.channels_last) if p.dim() == 4 else p for n, p in leaves.items()}

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the features of the model that the batch makes."""
        return self.model.features(self.generated(parameters, self.coordinates(parameters, x, None)), x)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the outputs of the model that the batch makes."""
        return self.model.forward(self.generated(parameters, self.coordinates(parameters, x, None)), x)

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Return each example's loss at θ plus λ‖v - c‖², ``[b, *input_shape], [b, ...] -> [b]``."""
        v = self.coordinates(parameters, x, y)
        penalty = self.strength * (v - parameters["centre"]).square().sum()
        if not self.labelled:
            return penalty.expand(count(x))
        return self.model.loss(self.generated(parameters, v), x, y) + penalty

    def made(self, psi: Tensor, client: ClientData) -> Tensor:
        """Return the model θ ``[d]`` that ψ makes of all train inputs of a client."""
        x, y = (None, None) if self.shares else visible_examples(client, labels=self.h1.labels)
        parameters = self.layout.split(psi)
        return self.subspace.expand(self.coordinates(parameters, x, y), parameters.get("origin"))

    def uses_labels(self, client: ClientData) -> bool:
        """Return True if a client contributes the loss: it has labels, or the loss needs none."""
        return client.id not in self.hidden and not (self.needs_labels and client.train.y is None)


FLOWDUP = FLowDUP()
