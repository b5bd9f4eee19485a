"""Fashion-MNIST itself, dealt as the papers deal it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import sources
from fedloom.data.federated import FederatedDataset
from fedloom.data.folders import data_root
from fedloom.data.partition import partition
from fedloom.data.schemes import ClassesScheme, DirichletScheme

pytestmark = pytest.mark.data


@pytest.fixture
def root(fashion_mnist_root: Path, tmp_path: Path) -> Path:
    """A data root with the real data set and no partitions yet."""
    (tmp_path / "datasets").symlink_to(fashion_mnist_root.resolve() / "datasets")
    return tmp_path


def test_the_published_numbers(root: Path) -> None:
    train, test = sources.load(sources.find("fashion-mnist"), root)
    assert train.images.shape == (60000, 1, 28, 28)
    assert np.bincount(train.labels).tolist() == [6000] * 10
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert train.images.mean() / 255 == pytest.approx(0.2860, abs=5e-5)
    assert train.images.std() / 255 == pytest.approx(0.3530, abs=5e-5)


def test_the_protocol_of_the_papers(root: Path) -> None:
    folder = partition(
        "fashion-mnist",
        ClassesScheme(clients=100, classes_per_client=2),
        seed=1,
        unseen_fraction=0.1,
        validation_fraction=1 / 6,
        root=root,
    )
    dataset = FederatedDataset.open(folder)
    assert {(c.train, c.validation, c.test) for c in dataset.manifest.clients} == {(500, 100, 100)}
    assert len(dataset.manifest.roster) == 90
    for entry in dataset.manifest.clients:
        assert sorted(entry.class_counts["train"])[-2:] == [250, 250]
        assert sorted(entry.class_counts["test"])[-2:] == [50, 50]
    pooled = [dataset.client(entry.id).train.x for entry in dataset.manifest.clients]
    assert float(sum(x.sum() for x in pooled) / sum(x.numel() for x in pooled)) == pytest.approx(0, abs=1e-3)


def test_a_thousand_clients_are_dealt_in_seconds(root: Path) -> None:
    start = time.monotonic()
    folder = partition(
        "fashion-mnist",
        DirichletScheme(clients=1000, alpha=0.1),
        seed=1,
        unseen_fraction=0.1,
        validation_fraction=1 / 6,
        root=root,
    )
    assert time.monotonic() - start < 15  # 1.5 s on an idle machine
    sizes = [(c.train, c.validation, c.test) for c in FederatedDataset.open(folder).manifest.clients]
    assert min(sizes) >= (30, 5, 5)


PARTITION = """
import sys
from fedloom.data.partition import partition
from fedloom.data.schemes import IidScheme
fractions = {"unseen_fraction": 0.1, "validation_fraction": 0.1}
print(partition("fashion-mnist", IidScheme(clients=20), seed=3, root=sys.argv[1], **fractions))
assert "torch" not in sys.modules
"""


def test_processes_that_partition_at_once_make_one_partition_without_torch(root: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", PARTITION, str(root)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert said[0] == said[1]
    folder = Path(said[0].strip())
    assert len(list((folder / "shards").iterdir())) == 20
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_the_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root("elsewhere") == Path("elsewhere")
    monkeypatch.delenv("FEDLOOM_DATA")
    assert data_root() == Path(os.environ["HOME"]) / ".cache" / "fedloom"
