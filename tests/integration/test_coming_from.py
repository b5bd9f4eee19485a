"""The first examples of other frameworks run as docs/coming-from.md says, on a few images."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom
from fedloom.experiment import OwnData, load_experiment

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


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


class TwoConvolutions(nn.Module):
    """Two convolutions and two linear layers, the last one a separate module, as in PFLlib's FedAvgCNN."""

    def __init__(self, in_features: int, num_classes: int, dim: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Sequential(nn.Conv2d(i, o, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2))
            for i, o in ((in_features, 32), (32, 64))
        )
        self.fc1 = nn.Sequential(nn.Linear(dim, 512), nn.ReLU(inplace=True))
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.fc1(self.conv2(self.conv1(x)).flatten(1)))
        return out


class BaseAndClassifier(nn.Module):
    """A base with BatchNorm and a classifier, like FL-bench's LeNet5; like its models it has a list of dropouts."""

    def __init__(self, dataset: str) -> None:
        super().__init__()
        assert dataset == "cifar10"
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


class Flattened(Blitz):
    """A network as written by NVFlare, with ``torch.flatten`` and named layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x)))))).flatten(1)
        out: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return out


class Digits(nn.Module):
    """Two convolutions and two linear layers on digits, with a view of a fixed size, as in OpenFL's workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 2), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 2).view(-1, 800)
        out: Tensor = self.fc2(F.relu(self.fc1(x)))
        return out


EXAMPLES: dict[str, tuple[str, Callable[..., nn.Module], int, int]] = {
    "pytorchexample.task.Net": ("Flower", Blitz, 10, 3),
    "flcore.trainmodel.models.FedAvgCNN": ("PFLlib", TwoConvolutions, 20, 2000),
    "src.utils.models.LeNet5": ("FL-bench", BaseAndClassifier, 100, 100),
    "model.SimpleNetwork": ("NVFlare", Flattened, 2, 2),
    "src.cnn_model.DigitRecognizerCNN": ("OpenFL", Digits, 2, 2),
}
"""By the name that a block imports: the framework, a network in its style, clients, and rounds."""


def imported(monkeypatch: pytest.MonkeyPatch, name: str, make: Any) -> None:
    """Make a name importable, as in the framework's folder."""
    *packages, own = name.split(".")
    for depth in range(1, len(packages) + 1):
        monkeypatch.setitem(sys.modules, ".".join(packages[:depth]), ModuleType(".".join(packages[:depth])))
    setattr(sys.modules[".".join(packages)], own, make)


def test_the_federation_over_a_network_is_a_valid_experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imported(monkeypatch, "src.cnn_model.DigitRecognizerCNN", Digits)
    (text,) = re.findall(
        r"^```yaml\n(# mnist.yaml\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "mnist.yaml").write_text(text)
    experiment = load_experiment(tmp_path / "mnist.yaml")
    assert isinstance(experiment.data, OwnData)
    assert (experiment.data.own.input_shape, experiment.federation.rounds) == ((1, 28, 28), 2)


def test_each_framework_has_a_code_block() -> None:
    assert len(BLOCKS) == len(EXAMPLES)
    titles = re.findall(r"^### (\S+):", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert titles == [framework for framework, *_ in EXAMPLES.values()]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_first_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a block unchanged, on a few random images and for at most three rounds."""
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    _, make, clients, rounds = EXAMPLES[name]
    imported(monkeypatch, name, make)
    module, _, own = name.rpartition(".")
    (block,) = [block for block in BLOCKS if f"from {module} import {own}" in block]
    (given,) = re.findall(r'"data": \{.*\},$', block, re.MULTILINE)
    section = eval(f"{{{given}}}")["data"]
    assert section["partition"]["clients"] == clients
    assert f'"rounds": {rounds},' in block
    channels, side = (1, 28) if section["dataset"] == "mnist" else (3, 32)
    random = np.random.default_rng(0)
    of_clients = {
        f"site-{i}": (random.integers(0, 256, (20, channels, side, side), dtype=np.uint8), random.permutation(20) % 10)
        for i in range(clients)
    }
    names: dict[str, Any] = {
        "data": fedloom.Federated.from_arrays(of_clients, classes=[str(i) for i in range(10)], held_out_fraction=0)
    }
    shorter = block.replace(given, '"data": data,').replace(f'"rounds": {rounds},', f'"rounds": {min(rounds, 3)},')
    exec(compile(shorter, str(PAGE), "exec"), names)
    run = names["run"]
    assert (run.summary["rounds"], run.summary["algorithm"]) == (min(rounds, 3), "fedavg")
    assert run.summary["seen"]["clients"] == clients
    assert np.isfinite(run.history["train.loss"].dropna()).all()
    assert getattr(run.experiment.model, "buffers", "shared") == ("local" if "model__buffers" in block else "shared")
