"""Data sets of torch as clients, and the keys of a training script that FedLoom has elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import refusing
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import fedloom
from fedloom.data.federated import FederatedDataset
from fedloom.errors import DataError, ExperimentError

N = 40
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 8)).astype(np.float32)
Y = np.arange(N) % 3


class Rows(Dataset[Any]):
    """Rows ``x[i]``, and what ``y`` returns for each."""

    def __init__(self, x: Any = None, y: Any = None) -> None:
        self.x = torch.tensor(X) if x is None else x
        self.y = Y.tolist() if y is None else y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Stream(IterableDataset[Any]):
    """The same rows without a length."""

    def __iter__(self) -> Any:
        return iter(zip(torch.tensor(X), Y.tolist(), strict=True))


def opened(dataset: Any, root: Path, **options: Any) -> FederatedDataset:
    """Return the partition of two clients that have the same data set."""
    clients = dict.fromkeys(("ann", "bob"), dataset)
    return fedloom.Federated.from_arrays(clients, held_out_fraction=0.0, root=root, **options).open()


def rows(dataset: FederatedDataset, what: str = "x") -> set[bytes]:
    """Return the different rows of the clients' tensors."""
    found: set[bytes] = set()
    for client in dataset.manifest.roster:
        tensors = dataset.tensors(client)
        for split in ("train", "validation", "test"):
            found |= {row.numpy().tobytes() for row in tensors[f"{split}_{what}"]}
    return found


def bytes_of(values: NDArray[Any]) -> set[bytes]:
    """Return the different rows of an array."""
    return {row.tobytes() for row in values}


@pytest.mark.parametrize(
    "dataset", [Rows(), TensorDataset(torch.tensor(X), torch.tensor(Y)), Stream(), Rows(X), Subset(Rows(), range(N))]
)
def test_a_client_may_be_a_data_set(dataset: Any, tmp_path: Path) -> None:
    found = opened(dataset, tmp_path)
    spec = found.manifest.spec
    assert (spec.kind, spec.input_shape, spec.classes) == ("features", (8,), 3)
    assert rows(found) == bytes_of(X)
    half = opened(Subset(Rows(), range(20)), tmp_path)
    assert rows(half) == bytes_of(X[:20])


def test_names_numbers_and_named_inputs_of_items(tmp_path: Path) -> None:
    named = opened(Rows(y=[f"kind {i}" for i in Y]), tmp_path)
    assert named.manifest.spec.class_names == ("kind 0", "kind 1", "kind 2")
    prices = (Y + 0.5).tolist()
    assert opened(Rows(y=prices), tmp_path).manifest.spec.task == "regression"
    several = [{"a": torch.tensor(row[:3]), "b": torch.tensor(row[3:])} for row in X]
    found = opened(Rows(several), tmp_path)
    assert set(found.manifest.spec.inputs or {}) == {"a", "b"}
    assert rows(found, "x.b") == bytes_of(X[:, 3:])


def test_pillow_images_of_items_are_pixels(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (N, 5, 4, 3)).astype(np.uint8)
    found = opened(Rows([Image.fromarray(image) for image in pixels]), tmp_path)
    assert (found.manifest.spec.kind, found.manifest.spec.input_shape) == ("pixels", (3, 5, 4))
    assert rows(found) == bytes_of(pixels.transpose(0, 3, 1, 2))


def test_a_scheme_divides_one_data_set(tmp_path: Path) -> None:
    partition = {"scheme": "iid", "clients": 2}
    data = fedloom.Federated.from_arrays({"all": Rows()}, partition=partition, held_out_fraction=0.0, root=tmp_path)
    assert len(data.open().manifest.roster) == 2
    with refusing(DataError, "dataset[0]", "[8]", "from_arrays"):
        fedloom.Federated.from_torchvision(Rows(), partition, root=tmp_path)


class Noisy(Rows):
    """Rows with a random transform."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return {"x": x + torch.randn(8)}, y


class Graph:
    """Object of another library."""


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (Noisy(), ("client ann[0]", "random")),
        (DataLoader(Rows()), ("client ann", "DataLoader", "next(iter(")),
        ([Graph(), Graph()], ("client ann", "2 Graph", "nodes")),
        ([Graph()] * 5, ("client ann", "5 Graph", "nodes")),
        (Rows([Graph()] * N), ("client ann", "Graph")),
        (Rows([torch.zeros(2 + i) for i in range(N)]), ("client ann", "stack")),
        (Rows([(torch.zeros(2), torch.zeros(2))] * N), ("client ann", "tuple and int")),
        (Rows(y=[]), ("client ann", "no items")),
        (TensorDataset(torch.tensor(X)), ("client ann", "tuple", "(x, y)")),
    ],
)
def test_what_is_no_pairs_is_refused_with_the_way(given: Any, facts: tuple[str, ...], tmp_path: Path) -> None:
    with refusing(DataError, *facts):
        opened(given, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("criterion", lambda outputs, y: outputs, "task"),
        ("criterion", nn.CrossEntropyLoss(), "task"),
        ("loss_fn", nn.functional.mse_loss, "docs/models.md"),
        ("optimizer", torch.optim.SGD, "algorithm.local.optimizer"),
    ],
)
def test_keys_of_a_script_name_their_place(key: str, value: Any, place: str, tmp_path: Path) -> None:
    with refusing(ExperimentError, f"{key}: unknown key", place) as refused:
        fedloom.run({"name": "t"}, out=tmp_path / "out", report=False, **{key: value})
    assert "evaluation.metrics" not in str(refused.value)


def test_a_metric_without_a_name_is_refused_at_its_key(tmp_path: Path) -> None:
    with refusing(ExperimentError, "evaluation.metrics.0", "<lambda>", "`def`"):
        fedloom.run({"name": "t"}, out=tmp_path / "out", evaluation__metrics=[lambda outputs, y: outputs])
