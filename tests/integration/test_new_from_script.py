"""`fedloom new --from`: what a script says becomes an experiment; the rest is listed. Scripts are never run."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import tells

from fedloom.cli.script import Conversion
from fedloom.experiment import load_experiment

SCRIPT = '''"""Train a classifier of Fashion-MNIST."""

import sys

import matplotlib_that_is_not_installed as plt
import torch
from torch import nn, optim
from torchvision import datasets, transforms

open("it ran", "w")
HIDDEN = 12


def layer(inputs, outputs=10):
    return nn.Linear(inputs, outputs)


class Net(nn.Module):
    def __init__(self, width, dropout=0.5, scale=1.0):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), layer(784, width), nn.Dropout(dropout))
        self.head = layer(width)

    def forward(self, x):
        return self.head(self.body(x))


def main(epochs=3, rate=0.05):
    scale = 2.0
    model = Net(HIDDEN, scale=scale)
    model = model.to("cpu")
    images = datasets.FashionMNIST("data", transform=transforms.RandomHorizontalFlip())
    loader = torch.utils.data.DataLoader(images, 64, shuffle=True)
    optimizer = optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for _ in range(epochs):
        for x, y in loader:
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()


main(*sys.argv)
plt.show()
'''


def converted(tmp_path: Path, text: str, **files: str) -> Conversion:
    for name, content in {"train": text, **files}.items():
        (tmp_path / f"{name}.py").write_text(content)
    return Conversion(tmp_path / "train.py", "mine")


def module(made: Conversion, *arguments: Any) -> torch.nn.Module:
    """Call the factory of the written file."""
    names: dict[str, Any] = {"__name__": "network"}
    exec(compile(made.network, "network.py", "exec"), names)
    return names["build"](*(arguments or ((1, 28, 28), 10)))


def test_a_script_becomes_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = converted(tmp_path, SCRIPT)
    assert not (tmp_path / "it ran").exists()
    assert made.experiment == {
        "name": "mine",
        "data": {
            "dataset": "fashion-mnist",
            "partition": {"scheme": "iid", "clients": 10},
            "held_out_fraction": 0.2,
        },
        "model": {"name": "module", "factory": "network:build"},
        "algorithm": {
            "name": "fedavg",
            "local": {
                "epochs": 1, "batch_size": 64, "optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4,
                "nesterov": True,
            },
            "personalize_steps": 20,
        },
        "federation": {"rounds": 3, "clients_per_round": 8},
        "runtime": {"workers": 0},
    }  # fmt: skip
    shapes = {name: tuple(value.shape) for name, value in module(made).state_dict().items()}
    assert shapes == {
        "body.1.weight": (12, 784), "body.1.bias": (12,), "head.weight": (10, 12), "head.bias": (10,),
    }  # fmt: skip
    assert "Net(12, scale=2.0)" in made.network
    assert "matplotlib" not in made.network
    assert "datasets" not in made.network
    lines = SCRIPT.splitlines()
    for place, _, here in made.taken:
        line = lines[int(place.removeprefix("train.py:")) - 1]
        assert any(word in line for word in ("Net(", "FashionMNIST", "DataLoader", "SGD", "range")), (line, here)
    left = {place: here for place, _, here in made.left}
    at = {word: next(i for i, line in enumerate(lines, 1) if word in line) for word in ("CosineA", "RandomH")}
    assert "algorithm.local.schedule" in left[f"train.py:{at['CosineA']}"]
    assert "data.augment" in left[f"train.py:{at['RandomH']}"]
    assert "data.partition" in left[""]
    assert len(made.left) == 3


NET = "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, width=4):\n        super().__init__()\n"


@pytest.mark.parametrize(
    ("code", "key", "value"),
    [
        ("optim.Adam(net.parameters())", "algorithm.local.optimizer", "adam"),
        ("optim.Adam(net.parameters())", "algorithm.local.lr", 1e-3),
        ("optim.AdamW(net.parameters(), lr=1e-2)", "algorithm.local.weight_decay", 0.01),
        ("optim.AdamW(net.parameters(), 1e-2, (0.8, 0.9))", "algorithm.local.betas", [0.8, 0.9]),
        ("optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-4)", "algorithm.local.weight_decay", 1e-4),
        ("p.add_argument('--learning-rate', default=0.3)\noptim.SGD(x, lr=a.learning_rate)", "algorithm.local.lr", 0.3),
        ("class C:\n    rate = 0.2\noptim.SGD(x, lr=C.rate)", "algorithm.local.lr", 0.2),
        ("DataLoader(d, batch_size=48)", "algorithm.local.batch_size", 48),
        ("nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)", "algorithm.local.clip", 0.5),
        ("for epoch in range(1, 7 + 1): pass", "federation.rounds", 7),
        ("for e in tqdm(range(EPOCHS)): pass\nEPOCHS = 6", "federation.rounds", 6),
        ("import flwr\nfor epoch in range(4): pass", "algorithm.local.epochs", 4),
        ("import flwr", "data.held_out_fraction", 0),
        ("Trainer(max_epochs=5, gradient_clip_val=2.0)", "federation.rounds", 5),
        ("Trainer(accumulate_grad_batches=3)", "algorithm.local.accumulate", 3),
        ("TrainingArguments('out')", "algorithm.local.lr", 5e-5),
        ("TrainingArguments('out', learning_rate=1e-4)", "algorithm.local.lr", 1e-4),
        ("TrainingArguments('out', per_device_train_batch_size=4)", "algorithm.local.batch_size", 4),
        ("TrainingArguments('out')", "federation.rounds", 3),
        ("nn.MSELoss()(x, y)", "data.source.task", "regression"),
        ("load_dataset('uoft-cs/cifar10')", "data.dataset", "cifar10"),
        ("load_dataset('zalando-datasets/fashion_mnist')", "data.dataset", "fashion-mnist"),
        ("torchvision.datasets.CIFAR100('x')", "data.dataset", "cifar100"),
        ("ImageFolder('photos')", "data.dataset", "folder"),
        ("pd.read_csv('t.csv').drop(columns='y')", "data.source.label", "y"),
    ],
)
def test_a_setting_is_taken_over(code: str, key: str, value: Any, tmp_path: Path) -> None:
    found: Any = converted(tmp_path, f"{NET}{code}\n").experiment
    for name in key.split("."):
        found = found[name]
    assert found == value


@pytest.mark.parametrize(
    ("code", "here"),
    [
        ("optim.RMSprop(net.parameters())", ["algorithm.local.optimizer"]),
        ("optim.SGD(net.parameters(), lr=find_lr())", ["algorithm.local.lr"]),
        ("rate = 1\nrate = 2\noptim.SGD(net.parameters(), lr=rate)", ["algorithm.local.lr"]),
        ("DataLoader(d, batch_size=size)\nDataLoader(t, batch_size=128)", ["algorithm.local.batch_size"]),
        ("pd.read_csv('t.csv')", ["data.source.label", "data.source.path"]),
        ("load_dataset('imdb')", ["data.npz"]),
        ("StepLR(o, 3)", ["algorithm.local.schedule"]),
        ("FocalLoss()", ["task"]),
        ("DirichletPartitioner(5)", ["data.partition"]),
        ("torchvision.datasets.MNIST('x')\nnn.MSELoss()", ["task"]),
        ("optim.SGD(a, lr=1)\noptim.Adam(b)", ["optimizer"]),
        ("model = Net(width=sizes[2])\noptim.SGD(model.parameters(), lr=1)", ["sizes", "network.py"]),
        ("", ["data.npz", "algorithm.local.optimizer", "algorithm.local.batch_size", "federation.rounds"]),
    ],
)
def test_what_is_left_is_listed_with_its_line(code: str, here: list[str], tmp_path: Path) -> None:
    made = converted(tmp_path, f"{NET}{code}\n")
    lines = (tmp_path / "train.py").read_text().splitlines()
    for words in here:
        place, text, _ = next(line for line in made.left if words in line[2])
        if place:
            assert text.split("(")[0] in lines[int(place.split(":")[1]) - 1]
        else:
            assert words not in code
    rate = made.experiment["algorithm"]["local"]["lr"]
    assert isinstance(rate, int | float)


def test_a_module_of_another_file_is_found(tmp_path: Path) -> None:
    text = "from model import Net\nfrom torch.optim import SGD\nnet = Net()\nSGD(net.parameters(), lr=0.1)\n"
    made = converted(tmp_path, text, model=f"open('ran', 'w')\n{NET}        self.layer = nn.Linear(3, width)\n")
    assert module(made).layer.weight.shape == (4, 3)
    assert made.taken[0][0] == "train.py:3"
    package = tmp_path / "package"
    package.mkdir()
    (package / "net.py").write_text(NET)
    (package / "train.py").write_text("from .net import Net\nfrom package.net import Net\nmodel = Net(width=2)\n")
    assert "class Net" in Conversion(package / "train.py", "mine").network


def test_arguments_without_a_value_are_left_in_the_factory(tmp_path: Path) -> None:
    text = NET.replace("width=4", "width, depth") + "        self.width = width\ndepth = 3\n"
    made = converted(tmp_path, text)
    assert "return Net(width, 3)" in made.network
    assert any("width" in here and "network.py" in here for _, _, here in made.left)
    with pytest.raises(NameError):
        module(made)


CELLS = (
    "import pandas as pd\nimport torch\nfrom torch import nn\n"
    + """
frame = pd.read_csv("cells.csv")
y = frame.pop("kind")
net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(list(zip(frame.values, y)), batch_size=16):
        nn.functional.cross_entropy(net(x), y).backward()
"""
)


@pytest.mark.slow
def test_the_folder_trains_as_its_readme_says(
    tmp_path: Path, fedloom: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 3))
    rows = [f"{a},{b},{c},{'big' if a + b > 0 else 'small'}" for a, b, c in x.round(3)]
    (tmp_path / "cells.csv").write_text("\n".join(["a,b,c,kind", *rows]))
    (tmp_path / "train.py").write_text(CELLS)
    code, out, _ = fedloom("new", "my-cells", "--from", "train.py", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["files"] == sorted(path.name for path in (tmp_path / "my-cells").iterdir())
    assert [line[2] for line in told["left"] if "client" not in line[2]] == []
    readme = (tmp_path / "my-cells" / "README.md").read_text()
    assert all(cell in readme for line in told["taken"] + told["left"] for cell in (line[0], line[2]))
    (block,) = re.findall(r"^```sh\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path / "my-cells")
    monkeypatch.syspath_prepend(".")
    monkeypatch.delitem(sys.modules, "network", raising=False)
    for line in block.splitlines():
        if line.startswith("fedloom "):
            code, out, err = fedloom(*shlex.split(line)[1:])
            assert code == 0, out + err
    for name in ("fedavg", "local"):
        summary = json.loads(Path("runs", name, "summary.json").read_text())
        assert (summary["algorithm"], summary["seen"]["clients"], summary["unseen"]["clients"]) == (name, 8, 2)
    monkeypatch.delitem(sys.modules, "network", raising=False)


def test_the_experiment_of_published_data_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = converted(tmp_path, SCRIPT)
    for name, text in made.files().items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "network", raising=False)
    assert load_experiment(tmp_path / "experiment.yaml").data.dataset == "fashion-mnist"
    monkeypatch.delitem(sys.modules, "network", raising=False)
    assert "fedloom data fetch fashion-mnist" in made.files()["README.md"]


# ---- bad input


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no such file"]),
        (b"x = (\n", ["line 1"]),
        (b"\nx = 1\n  y = 2\n", ["line 3"]),
        (b"x = '\xff'\n", []),
        (b"\0\0", []),
        (b"# coding: nonsense\n", []),
        (b"(" * 5000, []),
        (b"", ["module"]),
        (b"import sklearn\nmodel = sklearn.svm.SVC()\nmodel.fit(x, y)\n", ["module"]),
        (b'{"cells": [], "nbformat": 4}', ["module"]),
    ],
)
def test_a_script_that_says_nothing_is_refused(
    content: bytes | None, words: list[str], tmp_path: Path, fedloom: Callable[..., tuple[int, str, str]]
) -> None:
    if content is not None:
        (tmp_path / "train.py").write_bytes(content)
    before = sorted(tmp_path.iterdir())
    code, out, err = fedloom("new", "mine", "--from", "train.py")
    assert (code, out) == (2, "")
    assert tells(err, "train.py", *words)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_as_script_and_a_template_beside_it_are_refused(
    tmp_path: Path, fedloom: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "train.py").write_text(NET)
    assert fedloom("new", "mine", "--from", ".")[0] == 2
    code, _, err = fedloom("new", "comparison", "mine", "--from", "train.py")
    assert (code, tells(err, "--from", "comparison")) == (2, True)
    assert not (tmp_path / "mine").exists()


def test_a_folder_that_is_there_is_kept(tmp_path: Path, fedloom: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "train.py").write_text(NET)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine").write_text("mine")
    code, _, err = fedloom("new", "--from", "train.py")
    assert (code, tells(err, "train")) == (2, True)
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["mine"]
    (tmp_path / "train" / "mine").unlink()
    code, out, _ = fedloom("new", "--from", "train.py")
    assert code == 0
    assert tells(out, "network.py", "data.npz", "federation.rounds")
