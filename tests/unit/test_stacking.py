"""Clients that train together: their losses, and the rows of unfinished clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federations import CLASSES, IMAGE, clients
from test_client import SMALL, compare, group, starts
from torch.nn.functional import relu

from fedloom.algorithms.apfl import APFL
from fedloom.algorithms.client import LocalTrainer, train
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.per_fedavg import PER_FEDAVG
from fedloom.models.networks import MLP, LeNet

UNEVEN = (3, 21, 6, 1, 13)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum, decay, clipping": {"weight_decay": 0.01, "clip": 0.5, "lambda_theta": 0.1},
    "nesterov": {"nesterov": True, "clip_value": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.01},
    "masked": {"mask_absent": True},
    "accumulated": {"accumulate": 2},
}


class Squared(MLP):
    """Subclass with its own forward, which a stack must use."""

    def forward(self, parameters: Any, x: Any) -> Any:
        return super().forward(parameters, x) ** 2


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "model", [SMALL, LeNet(IMAGE, CLASSES), Squared(IMAGE, [6], CLASSES)], ids=["mlp", "lenet", "own"]
)
def test_clients_that_finish_first_do_not_affect_the_others(model: Any, name: str) -> None:
    """One client is alone for its last steps, as the epochs have 21, 13, 6, 3 and 1 examples."""
    s = LocalSGD.model_validate({"epochs": 2, "batch_size": 4, "lr": 0.05, **OPTIONS[name]})
    data, theta = clients(UNEVEN), starts(model, len(UNEVEN))
    together = train(model, group(data), theta, s)
    compare(together, [train(model, group([c]), theta[i : i + 1], s) for i, c in enumerate(data)])
    assert torch.equal(together.theta, train(model, group(data), theta, s).theta)


def test_stacked_logits_equal_those_of_each_client() -> None:
    model = MLP(IMAGE, [7, 5], CLASSES)
    theta = starts(model, 3)
    w = LocalTrainer(model, group(clients((2, 2, 2))), members=[0, 1, 2]).parameters(theta)
    x = torch.randn(3, 4, *IMAGE, dtype=torch.float64)
    found = model.forward_together(w, x)
    for i in range(3):
        p = model.layout.split(theta[i])
        h = relu(x[i].flatten(1) @ p["fc1.weight"].T + p["fc1.bias"])
        h = relu(h @ p["fc2.weight"].T + p["fc2.bias"])
        expected = h @ p["fc3.weight"].T + p["fc3.bias"]
        torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-12)


class Recorded(MLP):
    """SMALL, which records the number of clients of each call."""

    def __init__(self) -> None:
        super().__init__(IMAGE, [5], CLASSES)
        self.together: list[int] = []

    def forward_together(self, parameters: Any, x: Any) -> Any:
        self.together.append(len(x))
        return MLP.forward_together(SMALL, parameters, x)


@pytest.mark.parametrize(
    ("method", "gradients", "settings"),
    [(APFL, 2, {}), (PER_FEDAVG, 2, {}), (PER_FEDAVG, 4, {"hessian": "finite_difference"})],
    ids=["apfl", "per-fedavg", "per-fedavg with a Hessian"],
)
def test_methods_skip_finished_clients(method: Any, gradients: int, settings: dict[str, Any]) -> None:
    """Every gradient of a step is of the clients that make it, and the result equals that of each client alone."""
    s = method.settings.model_validate({"local": {"epochs": 2, "batch_size": 4, "lr": 0.05}, **settings})
    model, data, theta = Recorded(), clients(UNEVEN), starts(SMALL, len(UNEVEN))
    members = group(data)
    made = method.train(model, members, theta, s)
    counts = [s.local.count(len(client.train)) for client in data]
    going = [sum(count > t for count in counts) for t in range(max(counts))]
    assert going[-1] == 1 < going[0] == len(UNEVEN)
    assert model.together == [k for k in going for _ in range(gradients) if k > 1]
    alone = [method.train(SMALL, group([client]), theta[i : i + 1], s) for i, client in enumerate(data)]
    for what in ("theta", "steps", "loss"):
        expected = torch.cat([getattr(each, what) for each in alone])
        torch.testing.assert_close(getattr(made, what), expected, rtol=0, atol=1e-10)
