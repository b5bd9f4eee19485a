"""pFedBayes changes no weight without a gradient: where the likelihood has gradient 0, q stays at its prior.

Adam divides a gradient by its own size, so that a rounding error in the gradient of KL(q ‖ w), or in the server's
average, becomes a step of the learning rate.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLASSES, IMAGE, clients, federation
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.mean_field import MeanField, add_posterior_gradient, gaussian, prior_gradient
from fedloom.algorithms.pfedbayes import PFEDBAYES, PFedBayesSettings
from fedloom.data.federated import ClientData, Split
from fedloom.models.networks import MLP

DEAD = (slice(None), slice(None), slice(None), slice(2, 5))  # columns of pixels that are 0 in every image
HIDDEN = 4


def dark(data: ClientData) -> ClientData:
    """Return the client in float32, its dead pixels set to 0."""

    def part(split: Split) -> Split:
        x = split.x.float()
        x[DEAD] = 0
        return Split(x, split.y)

    return replace(data, train=part(data.train), validation=part(data.validation), test=part(data.test))


def dead_weights(model: MLP) -> Tensor:
    """Return positions in θ of the weights from dead pixels to hidden units."""
    pixels = torch.zeros(1, *IMAGE, dtype=torch.bool)
    pixels[DEAD] = True
    weights = pixels.flatten().expand(HIDDEN, -1).flatten()
    return weights.nonzero()[:, 0]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (6, {}),
        (7, {}),
        (6, {"moments": "kept"}),
        (6, {"beta": 0.7}),
        (6, {"averaged": 3}),
        (6, {"aggregation": "moments"}),
        (7, {"aggregation": "moments", "beta": 0.7}),
        (3, {"reset": True, "zeta": 10.0}),
        (6, {"optimizer": "ivon", "lr_personal": 0.1, "betas": [0.9, 0.99]}),
    ],
)
def test_weights_of_a_dead_input_do_not_change(tmp_path: Path, n: int, options: dict[str, Any]) -> None:
    model = MLP(IMAGE, [HIDDEN], CLASSES)
    problem = Setup(model, CLASSES, IMAGE, n, torch.float32)
    s = PFedBayesSettings.model_validate(
        {"steps": 100, "batch_size": 4, "optimizer": "adam", "lr_personal": 0.003, "lr_global": 0.003, "zeta": 1.0}
        | {"personalize_steps": 100, "draws": 2}
        | options
    )
    data = [dark(c) for c in clients([5 + i for i in range(n)] + [6])]
    run = federation(tmp_path, PFEDBAYES, s, problem, data, rounds=3, unseen=[data[-1].id])
    start, dead = run.state["v"], dead_weights(model)
    run.run()
    found = {"v": run.state["v"]}
    for c in data:
        tensors = run.predictors[3, c.id]["personal"].tensors()
        found[c.id] = torch.stack([tensors["mu"], tensors["rho"]])
    for name, v in found.items():
        assert v.dtype == torch.float32
        assert torch.equal(v[:, dead], start[:, dead]), name
        alive = torch.ones(v.shape[1], dtype=torch.bool).scatter_(0, dead, False)
        assert (v[:, alive] != start[:, alive]).double().mean() > 0.9, name


def test_gradients_of_equal_distributions_are_exactly_0() -> None:
    """In float32 and float64, for deviations from 1e-6 to 20."""
    for dtype in (torch.float32, torch.float64):
        v = gaussian(torch.linspace(-1, 1, 997, dtype=dtype), 0.0)
        v[1] = torch.linspace(-14, 20, 997, dtype=dtype)
        q, w = MeanField(v), MeanField(v)
        gradients = torch.zeros_like(v[0]), torch.zeros_like(v[0])
        add_posterior_gradient(*gradients, q, w, 3.0)
        for gradient in (*gradients, *prior_gradient(q, w)):
            assert not gradient.any()
