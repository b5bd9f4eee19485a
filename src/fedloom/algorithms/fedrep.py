"""FedRep: a shared body and a personal head, trained in alternation.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, Exploiting shared representations for personalized federated
learning, ICML 2021, arXiv 2102.07078, Algorithm 1. In a round a client trains its head with the body frozen, then the
body with the head frozen; only the body is sent. The head is the last linear layer, and the client's state between
rounds. A client without a head, in training or afterwards, starts from one drawn by its own generator.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.base import ClientGroup
from fedloom.algorithms.client import LocalSGD, Trained, train
from fedloom.algorithms.recipe import Averaging, Personalize, shared_model
from fedloom.models.flat import FlatModel


def head_then_body(model: FlatModel, group: ClientGroup, body: Tensor, s: FedRepSettings) -> Trained:
    """Run ClientUpdate of Algorithm 1: steps on the head h_i, then on the body φ, each with fresh momentum."""
    theta = with_heads(model, group, body)  # line 1
    head = train(model, group, theta, s.head, only="head", purpose="head", key="head.lr")  # line 2
    both = train(model, group, head.theta, s.local, only="body")  # line 3
    group.save_state(head=both.theta[:, body.shape[1] :])  # line 4
    return Trained(both.theta[:, : body.shape[1]], head.steps + both.steps, both.loss)


def with_own_head(key: str) -> Personalize:
    """Return the shared body with each client's head; a new client trains one by SGD under ``key``, the body frozen."""

    def personalize(model: FlatModel, group: ClientGroup, body: Tensor, s: Any) -> dict[str, Tensor]:
        theta, new, sgd = with_heads(model, group, body), group.new, getattr(s, key)  # line 6
        if new and s.personalize_epochs:
            sgd = sgd.with_steps(epochs=s.personalize_epochs)
            made = train(
                model, group, theta[new], sgd, members=new, only="head", purpose="personalize", key=f"{key}.lr"
            )
            theta[new] = made.theta
        return {"personal": theta}

    return personalize


def with_heads(model: FlatModel, group: ClientGroup, body: Tensor) -> Tensor:
    """Return θ ``[g, d]``: the shared body with each client's kept head, or a random head of its own if it is new."""
    drawn = [model.init(group.generator(i, "own-head"), body.dtype)[body.shape[1] :] for i in range(len(group))]
    return torch.cat([body, group.load_state("head", torch.stack(drawn).to(body.device))], dim=1)


class FedRepSettings(Averaging):
    """Keys of ``algorithm`` for FedRep; ``weighting`` defaults to the paper's, uniform."""

    weighting: Literal["examples", "uniform"] = Field(default="uniform", description="examples is the official code's")
    local: LocalSGD = Field(default=LocalSGD(epochs=1), description="the body's training in a round")
    head: LocalSGD = Field(default=LocalSGD(epochs=10), description="the head's training in a round, before the body's")
    personalize_epochs: int = Field(default=20, ge=0, description="epochs by which a client without a head makes one")


FEDREP = shared_model(
    "fedrep",
    FedRepSettings,
    local=head_then_body,
    personalize=with_own_head("head"),
    steps=lambda s, examples: s.head.with_steps(epochs=s.personalize_epochs).count(examples),
    update_bounds=lambda s, examples: (
        s.local.update_bounds(examples) | {"steps": s.head.count(examples) + s.local.count(examples)}
    ),
    shared="body",
    stateful=True,
    titles={"personal": "FedRep"},
)
