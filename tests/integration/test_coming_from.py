"""The first examples of other frameworks run as docs/coming-from.md says, on a few images."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


class Blitz(nn.Module):
    """The network of PyTorch's 60 minutes, which Flower's and NVFlare's first examples have, with Flower's view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x)))))).view(-1, 400)
        out: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return out


def pfllib() -> nn.Module:
    """Two convolutions and two linear layers, as PFLlib's FedAvgCNN for CIFAR-10."""
    blocks = [nn.Sequential(nn.Conv2d(i, o, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2)) for i, o in ((3, 32), (32, 64))]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(inplace=True), nn.Linear(512, 10))


class FLBench(nn.Module):
    """A base with BatchNorm and a classifier, as FL-bench's LeNet5; like its models it keeps a list of dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.all_features: list[Tensor] = []
        self.dropout: list[nn.Module] = []
        layers = [nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        layers += [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
        self.base = nn.Sequential(OrderedDict((f"layer{i}", layer) for i, layer in enumerate(layers)))
        self.classifier = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.base(x))
        return out


@pytest.mark.parametrize("make", [Blitz, pfllib, FLBench])
def test_the_first_example_runs(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    task = ModuleType("pytorchexample.task")
    task.Net = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytorchexample", ModuleType("pytorchexample"))
    monkeypatch.setitem(sys.modules, "pytorchexample.task", task)
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    given = '"data": {"dataset": "cifar10", "partition": {"scheme": "iid", "clients": 10}, "held_out_fraction": 0},'
    assert given in block
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (400, 3, 32, 32), dtype=np.uint8), np.arange(400) % 10
    clients = {f"site-{i}": (images[i::10], labels[torch.arange(i, 400, 10)]) for i in range(10)}
    clients = {name: (x, np.random.default_rng(1).permutation(y)) for name, (x, y) in clients.items()}
    names: dict[str, Any] = {
        "data": fedloom.Federated.from_arrays(clients, classes=[str(i) for i in range(10)], held_out_fraction=0)
    }
    exec(compile(block.replace(given, '"data": data,'), str(PAGE), "exec"), names)
    summary = names["run"].summary
    assert (summary["rounds"], summary["seen"]["clients"], summary["algorithm"]) == (3, 10, "fedavg")
