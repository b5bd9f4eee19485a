"""FedRoD: a generic head trained with balanced softmax, and a personal head on top of the same features.

H.-Y. Chen, W.-L. Chao, On bridging generic and personalized federated learning for image classification, ICLR 2022,
arXiv 2107.00778, Algorithm 1 (linear personal heads). Body and generic head are shared and minimize a loss in which
each logit is raised by the log of its label's count, so that clients with different mixes of labels have one goal. The
personal head adds to the generic logits and minimizes the plain loss; nothing of it reaches body and generic head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.base import Group
from fedloom.algorithms.client import LocalSGD, Trained, examples, train
from fedloom.algorithms.recipe import Averaging, shared_model
from fedloom.data.federated import ClientData
from fedloom.models.flat import FlatModel, Layout, with_forward


class TwoHeads(FlatModel):
    """A model with a second head and, in place of its head, what is never trained: the amounts by which logits rise.

    Its θ is that of the model, the second head [h], and the amounts [C], in this order.
    """

    def __init__(self, model: FlatModel) -> None:
        shapes = dict(model.layout.entries)
        heads = tuple((f"personal.{name}", shapes[name]) for name in model.layout.head)
        classes = shapes[model.layout.head[0]][0]
        entries = (*model.layout.entries, *heads, ("raised.by", (classes,)))
        self.layout = Layout(entries, channels_last=model.layout.channels_last)
        self.model = model

    def in_training(self) -> FlatModel:
        """Two heads on the model as training calls it."""
        return TwoHeads(self.model.in_training())

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Those of the model."""
        return self.model.features(parameters, x)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Those of the model."""
        return self.model.forward(parameters, x)

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """The model's own loss at the raised generic logits, and at the sum of both heads' logits, as one sum."""
        z = self.model.features(parameters, x)
        generic, personal = (
            F.linear(v, *(parameters[f"{prefix}{name}"] for name in self.model.layout.head))
            for v, prefix in ((z, ""), (z.detach(), "personal."))
        )
        raised = with_forward(self.model, lambda *_: generic + parameters["raised.by"])
        summed = with_forward(self.model, lambda *_: generic.detach() + personal)
        return raised.loss(parameters, x, y) + summed.loss(parameters, x, y)


def both_heads(model: FlatModel, group: Group, theta: Tensor, s: FedRoDSettings) -> Trained:
    """A client's visit; lines are those of docs/algorithms/fedrod.md."""
    d, two = theta.shape[1], TwoHeads(model)
    h = d - model.layout.body_size
    start = torch.cat([theta, heads(model, group, theta), raised(group, theta, s)], dim=1)  # line 1
    trained = train(two, group, start, s.local, only="body")  # lines 2-3: all but the last entry, which is no layer
    own = {"theta": trained.theta[:, :d]} if s.personal == "local" else {}
    group.keep(head=trained.theta[:, d : d + h], **own)  # line 4
    return Trained(trained.theta[:, :d], trained.steps, trained.loss)


def heads(model: FlatModel, group: Group, theta: Tensor) -> Tensor:
    """Personal heads ``[g, h]``: what each client kept, zeros for one that is new."""
    return group.recall("head", torch.zeros_like(theta[:, model.layout.body_size :]))


def raised(group: Group, theta: Tensor, s: FedRoDSettings) -> Tensor:
    """``balance`` · log n_c of each client's labels, ``[g, C]``; so low that it has no part for one that it lacks."""
    counts = torch.stack([torch.bincount(_labels(client), minlength=client.classes) for client in group.clients])
    return (s.balance * counts.to(theta).log()).clamp(min=-1e9) if s.balance else torch.zeros_like(counts).to(theta)


def _labels(client: ClientData) -> Tensor:
    labels = examples(client, labelled=True).y
    assert labels is not None
    return labels


def with_both_heads(model: FlatModel, group: Group, theta: Tensor, s: FedRoDSettings) -> dict[str, Tensor]:
    """``personal`` is a model with the sum of both heads (line 6), ``global`` is θ, which is all a new client gets."""
    size = model.layout.body_size
    own = group.recall("theta", theta) if s.personal == "local" else theta
    return {"personal": torch.cat([own[:, :size], own[:, size:] + heads(model, group, theta)], 1), "global": theta}


class FedRoDSettings(Averaging):
    """Keys of ``algorithm`` for FedRoD."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="training in a round, of all parts together")
    balance: float = Field(
        default=1.0, ge=0, le=100, description="factor on log n_c in the generic loss; 0 is the plain loss"
    )
    personal: Literal["shared", "local"] = Field(
        default="shared",
        description="body and generic head that a personal head is added to: the shared ones as they are now, or the "
        "client's own as its last training left them, which it then keeps",
    )

    @model_validator(mode="after")
    def _all_labels(self) -> Self:
        if self.local.mask_absent:
            raise ValueError("local.mask_absent: found true; allowed: false, because the balanced loss masks by itself")
        return self


FEDROD = shared_model(
    "fedrod",
    FedRoDSettings,
    local=both_heads,
    personalize=with_both_heads,
    steps=lambda s, examples: 0,
    needs_head=True,
    linear_head=True,
    by_batch=False,
    stateful=True,
    needs_classes=True,
    titles={"personal": "FedRoD", "global": "FedRoD, generic head"},
)
