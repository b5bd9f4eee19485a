"""Model, data exported by research/benchmarks/flower.py, and local SGD."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

torch.set_num_threads(1)


class LeNet(nn.Module):
    """Model of papers/001, Table 3, written by hand for speed: channels-last, ReLU after pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(512, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        h = F.relu(F.max_pool2d(self.conv1(x), 2))
        h = F.relu(F.max_pool2d(self.conv2(h), 2)).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(h)))))


def shard(folder: str, client: int) -> dict[str, Tensor]:
    """Return one client's ``train_x``, ``train_y``, ``test_x``, ``test_y``, normalized."""
    return load_file(Path(folder) / f"client-{client}.safetensors")


def visit_generator(seed: int, number: int, client: int) -> torch.Generator:
    """Return the generator that draws the batches of a client's visit in one round."""
    return torch.Generator().manual_seed(1_000_000 * seed + 1000 * number + client)


def train(net: nn.Module, x: Tensor, y: Tensor, config: Mapping[str, Any], generator: torch.Generator) -> float:
    """Run SGD steps on fresh permutations without incomplete batches; return the mean loss.

    It computes what ``torch.optim.SGD(foreach=True)`` does, whose first use imports another 10 s of torch; Flower would
    pay for that with every message.
    """
    steps, size = int(config["steps"]), int(config["batch-size"])
    lr, momentum = float(config["lr"]), float(config["momentum"])
    net.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    parameters = list(net.parameters())
    velocity = [torch.zeros_like(p) for p in parameters]
    total, order = 0.0, torch.zeros(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(x), generator=generator)
        batch, order = order[:size], order[size:]
        loss = F.cross_entropy(net(x[batch]), y[batch])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, gradients)
            torch._foreach_add_(parameters, velocity, alpha=-lr)
        total += loss.item()
    return total / steps


@torch.no_grad()
def accuracy(net: nn.Module, folder: str, clients: int) -> float:
    """Return the mean over clients of the accuracy on their test data."""
    found = []
    for client in range(clients):
        data = shard(folder, client)
        found.append(float((net(data["test_x"]).argmax(1) == data["test_y"]).double().mean()))
    return sum(found) / clients


def write_figures(net: nn.Module, folder: str, clients: int, ends: list[float]) -> None:
    """Write the times of the rounds' ends and the global model's accuracy for research/benchmarks/flower.py."""
    partial = Path(folder) / "flower.json.partial"
    partial.write_text(json.dumps({"ends": ends, "accuracy": accuracy(net, folder, clients)}))
    partial.rename(Path(folder) / "flower.json")
