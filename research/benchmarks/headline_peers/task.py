"""Parts of research/benchmarks/headline.py's two tasks for every system: models, data, a client's epoch, figures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


def lr() -> nn.Module:
    """Return a logistic regression on 28x28 images: 7,850 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def cnn() -> nn.Module:
    """Return the CNN of pfl-research's CIFAR-10 benchmark without its dropout: 1,626,442 parameters."""
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10))
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
    return model


MODELS = {"lr": lr, "cnn": cnn}


class Data:
    """Data exported by research/benchmarks/headline.py: normalized examples, and the index of each client's first."""

    def __init__(self, folder: Path) -> None:
        tensors = load_file(folder / "data.safetensors")
        self.train_x, self.train_y = tensors["train_x"], tensors["train_y"]
        self.test_x, self.test_y = tensors["test_x"], tensors["test_y"]
        self._starts: list[int] = tensors["starts"].tolist()

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._starts) - 1

    def client(self, number: int) -> tuple[Tensor, Tensor]:
        """Return one client's training examples."""
        mine = slice(self._starts[number], self._starts[number + 1])
        return self.train_x[mine], self.train_y[mine]


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the accuracy over all test examples."""
    batches = zip(data.test_x.split(1000), data.test_y.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches) / len(data.test_y)


def epoch(model: nn.Module, x: Tensor, y: Tensor, batch_size: int, lr: float) -> float:
    """Run one pass of plain SGD as in Flower's tutorials, but indexed from one tensor; return the mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    total, batches = 0.0, torch.randperm(len(x)).split(batch_size)
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(batches)


def write_figures(settings: dict[str, Any], model: nn.Module, data: Data, ends: list[float]) -> None:
    """Write the times of the rounds and the model's accuracy for research/benchmarks/headline.py."""
    figures = {"ends": ends, "accuracy": accuracy(model, data), "written": time.time()}
    Path(settings["out"]).write_text(json.dumps(figures))
