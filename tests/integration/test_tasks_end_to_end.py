"""Runs of every task and kind of input on data in memory: trained, measured, saved, and personalized."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import mentions
from torch import nn

import fedloom
from fedloom.errors import DataError, ExperimentError
from fedloom.kubeflow import steps
from fedloom.serving.serve import serve_run

pytestmark = pytest.mark.usefixtures("forks")

N = 40
RNG = np.random.default_rng(7)
torch.manual_seed(11)  # the modules below start from the same parameters in every run
ROWS = RNG.normal(2, 3, (2 * N, 4)).astype(np.float32)
IMAGES = RNG.integers(0, 256, (2 * N, 3, 8, 8), dtype=np.uint8)
CODES = RNG.integers(0, 9, (2 * N, 3))
TOKENS = RNG.integers(0, 50, (2 * N, 6))
PRICES = ROWS @ np.array([4.0, -2.0, 1.0, 3.0]) + 50
LABELS = (ROWS[:, :3] > 2).astype(np.int64)


class Pixels(nn.Module):
    """Logits of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.conv(x)
        return found


class Tokens(nn.Module):
    """Logits of each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.embed(x))
        return found


class Mixed(nn.Module):
    """One number, or several logits, from measurements and codes."""

    def __init__(self, classes: int = 1) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 2), nn.Linear(4 + 6, classes)

    def forward(self, row: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.cat([row, self.embed(codes).flatten(1)], 1))
        return found


def ran(x: Any, y: Any, folder: Path, model: Any, method: dict[str, Any] | None = None) -> fedloom.Run:
    """Run two rounds on two clients."""

    def part(rows: slice) -> Any:
        return {name: each[rows] for name, each in x.items()} if isinstance(x, Mapping) else x[rows]

    clients = {name: (part(rows), y[rows]) for name, rows in (("a", slice(0, N)), ("b", slice(N, None)))}
    local = {"steps": 5, "batch_size": 8, "lr": 0.05}
    section = method or {"name": "fedavg", "local": local}
    experiment: dict[str, Any] = {
        "name": "task",
        "data": fedloom.Federated.from_arrays(clients, root=folder / "data", held_out_fraction=0.0),
        "algorithm": section,
        "federation": {"rounds": 3, "clients_per_round": 2},
        "evaluation": {"every": 1},
        "runtime": {"workers": 0},
    }
    if isinstance(model, nn.Module):
        return fedloom.run(experiment, model=model, out=folder / "run", report=False, progress=False)
    return fedloom.run({**experiment, "model": model}, out=folder / "run", report=False, progress=False)


MLP = {"name": "mlp", "hidden": [8]}
EMBEDDING = {"network": "mlp"}
PREDICTED = {"regression": PRICES, "multilabel": LABELS}


@pytest.mark.parametrize(
    "method", [{"name": "pefll", "embedding": EMBEDDING}, {"name": "pfedhn"}, {"name": "pfedbayes"}]
)
@pytest.mark.parametrize("task", PREDICTED)
def test_methods_of_the_papers_support_other_tasks(task: str, method: dict[str, Any], tmp_path: Path) -> None:
    run = ran(ROWS, PREDICTED[task], tmp_path, MLP, method)
    assert run.summary["task"] == task
    assert np.isfinite(run.summary["seen"]["metrics"][run.summary["headline"]["name"]]["mean"])
    assert not (tmp_path / "run" / "descriptors.json").exists()  # there are no classes to compare descriptors with


CASES = {
    "regression": (ROWS, PRICES, MLP),
    "multilabel": (ROWS, LABELS, MLP),
    "linear regression": (ROWS, PRICES, {"name": "logistic"}),
    "integers as numbers": (CODES, PRICES, MLP),
    "integers of a linear module": (CODES, PRICES, nn.Sequential(nn.Linear(3, 1))),
    "segmentation": (IMAGES, (IMAGES[:, 0] > 100).astype(np.int64), Pixels()),
    "next token": (TOKENS, TOKENS, Tokens()),
    "named inputs": ({"row": ROWS, "codes": CODES}, PRICES, Mixed()),
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", list(CASES))
def test_every_task_is_trained_measured_and_saved(case: str, tmp_path: Path) -> None:
    x, y, model = CASES[case]
    run = ran(x, y, tmp_path, model)
    losses = run.history["train.loss"].dropna().to_numpy()
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert not OF_CLASSES & {path.name for path in run.folder.iterdir()}
    made = run.models("a")
    raw = (
        {name: torch.from_numpy(each[:5]) for name, each in x.items()}
        if isinstance(x, dict)
        else torch.from_numpy(x[:5])
    )
    found = made(raw)
    assert bool(found.isfinite().all())
    shape = {"segmentation": (5, 2, 8, 8), "next token": (5, 6, 50), "multilabel": (5, 3)}.get(case, (5, 1))
    assert tuple(found.shape) == shape
    if shape == (5, 1):  # in the targets' units
        assert float((found[:, 0] - torch.from_numpy(np.asarray(y[:5]))).abs().mean()) < 3 * float(np.std(y))
        assert abs(float(found.mean()) - float(np.mean(y))) < 3 * float(np.std(y))
    made.save(tmp_path / "m.pt2")
    assert torch.allclose(torch.export.load(tmp_path / "m.pt2").module()(raw), found, atol=1e-4)


OF_CLASSES = {"confusion.json", "confusion.csv", "calibration.json"}
REPORTED = {"Confusion matrix", "Calibration", "Client by client"}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["regression", "segmentation", "classes"])
def test_only_classification_has_the_files_and_sections_of_classes(case: str, tmp_path: Path) -> None:
    of_classes = case == "classes"
    x, y, model = (ROWS, LABELS[:, 0], MLP) if of_classes else CASES[case]
    run = ran(x, y, tmp_path, model)
    shards = next((tmp_path / "data").rglob("partition.json")).parent
    found = steps.evaluate_task(run.folder, shards, "last", tmp_path / "evaluated")
    assert (found["confusion"] is not None) is of_classes
    statistics = tmp_path / "statistics.json"
    statistics.write_text(json.dumps({key: value for key, value in found.items() if key != "confusion"}))
    for folder in (run.folder, tmp_path / "evaluated"):
        files = {path.name for path in folder.iterdir()}
        assert (files >= OF_CLASSES) if of_classes else not (files & OF_CLASSES)
        assert ("outputs.json" in files) is (case == "segmentation")
        steps.report_task(folder, statistics, tmp_path / "page.html", tmp_path / "table.md")
        page = (tmp_path / "page.html").read_text()
        assert {title for title in REPORTED if f"<h2>{title}</h2>" in page} == (REPORTED if of_classes else set())
    method = {"name": "fedprox", "local": {"steps": 5, "batch_size": 8, "lr": 0.05}}
    other = ran(x, y, tmp_path / "other", model, method)
    assert len(fedloom.compare([run, other]).table) == 2


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Serve a run in a thread; yields the address."""
    stop, ready = threading.Event(), threading.Event()
    at: list[str] = []

    def started(address: str) -> None:
        at.append(address)
        ready.set()

    thread = threading.Thread(target=lambda: serve_run(str(run), "127.0.0.1:0", stop=stop, started=started))
    thread.start()
    try:
        assert ready.wait(60)
        yield at[0]
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["regression", "multilabel", "named inputs", "integers as numbers", "next token"])
def test_new_clients_get_equal_models_from_a_folder_and_over_the_network(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, model = CASES[case]
    if isinstance(model, nn.Module):  # an address names code, which the environment must permit
        factory = f"{__name__}:{type(model).__name__}"
        monkeypatch.setenv("FEDLOOM_FACTORIES", factory)
        model = {"name": "module", "factory": factory}
    run = ran(x, y, tmp_path, model)
    some = {name: each[:20] for name, each in x.items()} if isinstance(x, dict) else x[:20]
    here = fedloom.personalize(run.folder, some, y[:20], client="new")
    with served(run.folder) as address:
        there = fedloom.personalize(address, some, y[:20], client="new")
    raw = {name: torch.from_numpy(each) for name, each in some.items()} if isinstance(x, dict) else some
    assert torch.equal(there(raw), here(raw))
    assert bool(here(raw).isfinite().all())
    assert there.card.spec.targets == here.card.spec.targets
    with pytest.raises(DataError):
        fedloom.personalize(run.folder, some, y[:19], client="new")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["knn-per", "pfedgp", "pefll"])
def test_methods_that_need_one_tensor_reject_named_inputs(method: str, tmp_path: Path) -> None:
    x = {"row": ROWS, "codes": CODES}
    how: dict[str, Any] = {"name": method} if method == "pfedgp" else {"name": method, "local": {"steps": 1}}
    with pytest.raises(ExperimentError) as error:
        ran(x, np.arange(2 * N) % 3, tmp_path, Mixed(3), how)
    assert mentions(str(error.value), "named")
