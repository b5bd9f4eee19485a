"""FedALA: each client learns, element by element, how much of the shared model to adopt.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, FedALA: adaptive local aggregation for personalized
federated learning, AAAI 2023, arXiv 2212.01197, Algorithm 1. A client's visit starts at Θ̂_i: its own model Θ_i of the
last visit, moved towards the shared w by weights W_i in [0, 1] of each element of the last layers, and w in the other
layers (eq. 4). W_i descends on the loss of Θ̂_i over a part of the data (eq. 5): at first until the losses settle, but
for at most ``start_epochs``, later for one epoch. Θ_i and W_i are the client's state between rounds. A client without
them, in training or afterwards, starts at w. Line numbers refer to docs/algorithms/fedala.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.client import LocalTrainer, Trained, adapt, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg, FedAvgSettings
from fedloom.models.flat import FlatModel, Layout

SETTLED = 10
"""Number of last epochs whose losses are compared."""


@dataclass(frozen=True, eq=False)
class LastLayers:
    """Last layers of a model: the names of their entries, and their k coordinates in θ."""

    names: list[str]
    at: Tensor  # [k]

    @classmethod
    def from_layout(cls, layout: Layout, layers: int) -> LastLayers:
        """Return the last layers, without moving buffers; the head counts as one layer."""
        entries = [name for name, _ in layout.entries if name not in layout.buffers]
        layer = {name: "" if name in layout.head else f"{name.rpartition('.')[0]}." for name in entries}
        last = list(dict.fromkeys(layer.values()))[-layers:]
        names = [name for name in entries if layer[name] in last]
        return cls(names, layout.mask(names).nonzero()[:, 0])

    def mixed(self, shared: Tensor, own: Tensor, weights: Tensor) -> Tensor:
        """Return Θ̂_i: w, and in these layers Θ_i + (w - Θ_i) W_i, exactly w at 1 and Θ_i at 0 (eq. 4)."""
        theta = shared.clone()
        theta[:, self.at] = own[:, self.at].lerp(shared[:, self.at], weights)
        return theta


def learned(
    local: LocalTrainer,
    layers: LastLayers,
    shared: Tensor,
    own: Tensor,
    weights: Tensor,
    started: Tensor,
    s: FedALASettings,
) -> tuple[Tensor, Tensor]:
    """Return the trained W_i ``[g, k]``, and the steps made on them ``[g, 1]`` float64 (lines 3-5).

    Parameters
    ----------
    started
        ``[g, 1]``, 1 for clients that have trained W_i before, and make one epoch.
    """
    apart = (shared - own)[:, layers.at]
    counts = torch.tensor([s.weight_steps(n) for n in local.sizes])
    running, steps, losses = torch.ones(len(counts), dtype=torch.bool), torch.zeros(len(counts)), list[Tensor]()
    for epoch in range(s.start_epochs):
        if epoch:
            running &= started[:, 0].cpu() == 0
        if epoch > SETTLED:
            running &= torch.stack(losses[-SETTLED:]).std(0, correction=0) >= s.threshold
        if not running.any():
            break
        losses.append(torch.zeros(len(counts), dtype=torch.float64))
        for t, batch in enumerate(local.batches(s.local.batch_size, counts.tolist(), "weights")):  # the same each time
            w = local.parameters(layers.mixed(shared, own, weights))
            gradients, loss = local.gradient(w, batch, parameters=[w[name] for name in layers.names])
            slope = torch.cat([gradient.reshape(len(counts), -1) for gradient in gradients], dim=1)
            active = running & (t < counts)
            step = (weights - s.weights_lr * slope * apart).clamp(0, 1)  # line 5
            weights = torch.where(active.to(weights.device)[:, None], step, weights)
            losses[-1] = torch.where(active, loss.cpu().double(), losses[-1])
        steps += running * counts
    return weights, steps.double()[:, None]


def starts(
    model: FlatModel, group: ClientGroup, shared: Tensor, s: FedALASettings
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return Θ̂_i of all clients of the group, the other state that they keep, and the steps made on W_i."""
    layers = LastLayers.from_layout(model.layout, s.layers)
    own, steps = group.load_state("theta", shared), torch.zeros(len(group), 1, dtype=torch.float64)
    weights = group.load_state("weights", torch.ones_like(shared[:, : len(layers.at)]))
    started = group.load_state("started", torch.zeros_like(shared[:, :1]))
    if old := [i for i in range(len(group)) if i not in group.new]:
        local = LocalTrainer(model, group, mask_absent=s.local.mask_absent, members=old)
        weights[old], steps[old] = learned(local, layers, shared[old], own[old], weights[old], started[old], s)
        started[old] = 1
    return layers.mixed(shared, own, weights), {"weights": weights, "started": started}, steps


class FedALASettings(FedAvgSettings):
    """Keys of ``algorithm`` for FedALA."""

    layers: int = Field(default=1, ge=1, description="p, the number of last layers whose elements have weights")
    weights_lr: float = Field(default=1.0, gt=0, description="η, the learning rate of the weights W_i")
    share: float = Field(default=0.8, gt=0, le=1, description="s, the share of the train split that trains W_i")
    start_epochs: int = Field(
        default=50, ge=1, description="maximum number of epochs of the first training of W_i; later ones have one"
    )
    threshold: float = Field(
        default=0.1,
        ge=0,
        description="standard deviation of the losses of ten epochs below which the first training of W_i ends",
    )
    personalize_steps: int = Field(
        default=0, ge=0, description="local SGD steps from w to personal for a client without its own model"
    )

    def weight_steps(self, examples: int) -> int:
        """Return the steps of one epoch on W_i, at least one."""
        return max(1, int(self.share * examples) // min(self.local.batch_size, examples)) if examples else 0


class FedALA(FedAvg):
    """FedAvg whose clients start from a mixture of the shared model and their own."""

    name = "fedala"
    settings = FedALASettings
    example = {"start_epochs": 12}
    predictors = {"personal": "FedALA", "global": "FedALA, shared model"}
    stateful = True
    no_example_privacy = "Clients start from weights W_i, which follow from losses and gradients without noise."

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: FedALASettings) -> Trained:
        """Perform lines 2-8."""
        start, weights, steps = starts(model, group, theta, s)
        trained = train(model, group, start, s.local)  # line 7
        group.save_state(theta=trained.theta, **weights)  # line 8
        return Trained(trained.theta, trained.steps + steps, trained.loss)

    def personalize(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: FedALASettings) -> dict[str, Tensor]:
        """Return ``personal``, Θ̂_i (line 10), which for new clients is w after SGD steps, and ``global``, w."""
        personal, sgd = starts(model, group, theta, s)[0], s.local.with_steps(steps=s.personalize_steps)
        personal = adapt(model, group, personal, sgd, group.new)
        return {"personal": personal, "global": theta}

    def update_bounds(self, s: Any, examples: int) -> Mapping[str, float]:
        """Return the bound of the steps, which include those of W_i; a client's start may be far from w."""
        return {"steps": s.local.count(examples) + s.start_epochs * s.weight_steps(examples)}


FEDALA = FedALA()
