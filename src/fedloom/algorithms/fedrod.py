"""FedRoD: a generic head trained with balanced softmax, and a personal head on top of the same features.

H.-Y. Chen, W.-L. Chao, On bridging generic and personalized federated learning for image classification, ICLR 2022,
arXiv 2107.00778, Algorithm 1 (linear personal heads). Body and generic head are shared and minimize a loss in which
each logit is raised by the log of its label's count, so that clients with different label mixes have one objective. The
personal head adds to the generic logits and minimizes the plain loss; its gradient reaches neither body nor generic
head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.batches import train_examples
from fedloom.algorithms.client import Trained, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData
from fedloom.models.flat import DerivedModel, FlatModel, Layout, with_forward


class FedRoDSettings(Averaging):
    """Keys of ``algorithm`` for FedRoD."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="training in a round, of all parts together")
    balance: float = Field(
        default=1.0, ge=0, le=100, description="factor on log n_c in the generic loss; 0 is the plain loss"
    )
    personal: Literal["shared", "local"] = Field(
        default="shared",
        description=(
            "body and generic head used with a personal head: the current shared ones, or the client's own from its "
            "last training, which it then keeps"
        ),
    )

    @model_validator(mode="after")
    def _all_labels(self) -> Self:
        if self.local.mask_absent:
            raise ValueError("local.mask_absent: set it to false, because the balanced loss already masks labels")
        return self


class FedRoD(FedAvg):
    """Generic head trained with balanced softmax, and personal heads."""

    name = "fedrod"
    settings = FedRoDSettings
    tasks = ("classification",)
    restriction = "Its generic head is trained with a softmax that balances the counts of classes."
    needs = ("labels", "head", "linear head")
    predictors = {"personal": "FedRoD", "global": "FedRoD, generic head"}
    stateful = True

    def example_privacy(self, settings: Any) -> str | None:
        """Return the reason unless both losses are plain: a balanced one uses the counts of labels."""
        counts = "The balanced loss uses a client's counts of labels, which have no noise; set algorithm.balance to 0."
        return counts if settings.balance else None

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: FedRoDSettings) -> Trained:
        """Train in one visit of a client; line numbers refer to docs/algorithms/fedrod.md."""
        d, two = theta.shape[1], TwoHeads(model)
        h = d - model.layout.body_size
        start = torch.cat([theta, heads(model, group, theta), raised(group, theta, s)], dim=1)  # line 1
        trained = train(two, group, start, s.local, only="body")  # lines 2-3: all but the last entry, the offsets
        own = {"theta": trained.theta[:, :d]} if s.personal == "local" else {}
        group.save_state(head=trained.theta[:, d : d + h], **own)  # line 4
        return trained.part(trained.theta[:, :d])

    def personalize(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: FedRoDSettings) -> dict[str, Tensor]:
        """Return ``personal``, with the sum of both heads (line 6), and ``global``, θ; for new clients both are θ."""
        size = model.layout.body_size
        own = group.load_state("theta", theta) if s.personal == "local" else theta
        return {"personal": torch.cat([own[:, :size], own[:, size:] + heads(model, group, theta)], 1), "global": theta}


def raised(group: ClientGroup, theta: Tensor, s: FedRoDSettings) -> Tensor:
    """Return ``balance`` · log n_c of each client's labels, ``[g, C]``; labels that it lacks get a very low number."""
    counts = torch.stack([torch.bincount(_labels(client), minlength=client.classes) for client in group.clients])
    return (s.balance * counts.to(theta).log()).clamp(min=-1e9) if s.balance else torch.zeros_like(counts).to(theta)


def heads(model: FlatModel, group: ClientGroup, theta: Tensor) -> Tensor:
    """Return personal heads ``[g, h]``: the kept one of each client, zeros for a new client."""
    return group.load_state("head", torch.zeros_like(theta[:, model.layout.body_size :]))


class TwoHeads(DerivedModel):
    """Model with a second head and untrained logit offsets.

    θ consists of the model's θ, the second head [h], and the offsets [C], in this order. The offsets take the head's
    place in the layout, so that training the body leaves them unchanged.
    """

    def __init__(self, model: FlatModel) -> None:
        shapes = dict(model.layout.entries)
        heads = tuple((f"personal.{name}", shapes[name]) for name in model.layout.head)
        classes = shapes[model.layout.head[0]][0]
        entries = (*model.layout.entries, *heads, ("raised.by", (classes,)))
        buffers = model.layout.buffers
        super().__init__(model, Layout(entries, channels_last=model.layout.channels_last, buffers=buffers))

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Return the sum of the model's loss at the raised generic logits and at the sum of both heads' logits."""
        z = self.model.features(parameters, x)
        generic, personal = (
            F.linear(v, *(parameters[f"{prefix}{name}"] for name in self.model.layout.head))
            for v, prefix in ((z, ""), (z.detach(), "personal."))
        )
        raised = with_forward(self.model, lambda *_: generic + parameters["raised.by"])
        summed = with_forward(self.model, lambda *_: generic.detach() + personal)
        return raised.loss(parameters, x, y) + summed.loss(parameters, x, y)


def _labels(client: ClientData) -> Tensor:
    labels = train_examples(client, labelled=True).y
    assert labels is not None
    return labels


FEDROD = FedRoD()
