"""Random draws of a module: independent per client, equal for every use of a batch, and repeatable."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_method import METHODS
from every_method import run as run_method
from federations import CLASSES, IMAGE, made_by
from test_local_data import TASK, people
from test_module_check import Small, model_of, small_group
from test_module_model import of_clients
from torch import Tensor, nn

import fedloom
from fedloom.algorithms.client import LocalTrainer, train
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.core.draws import drawing_from, drawing_with, seed_from
from fedloom.models.module import ModuleModel


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]  # noqa: NPY002


@pytest.mark.parametrize("fails", [False, True])
def test_a_seed_controls_and_restores_all_generators(fails: bool) -> None:
    def states() -> list[object]:
        numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
        return [torch.get_rng_state().tolist(), random.getstate(), numpy["key"].tolist(), numpy["pos"]]

    random_draws = []
    for _ in range(2):
        draw()  # other draws in between
        before = states()
        with contextlib.suppress(ValueError), drawing_from(torch.Generator().manual_seed(7)):
            random_draws.append(draw())
            if fails:
                raise ValueError
        assert states() == before
    assert random_draws[0] == random_draws[1]
    with drawing_with(seed_from(torch.Generator().manual_seed(7)), torch_alone=True):
        assert [a == b for a, b in zip(draw(), random_draws[0], strict=True)] == [True, False, False]


def test_seeds_of_a_generator_differ() -> None:
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(2):
        with drawing_from(generator):
            found.append(draw())
    assert all(a != b for a, b in zip(*found, strict=True))


class Mixed(Small):
    """Module that draws by three libraries."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if not self.training:
            return logits
        return logits * (1 + torch.rand(()) + random.random() + np.random.rand())  # noqa: NPY002


def test_draws_of_a_client_depend_only_on_itself() -> None:
    for make in (Mixed, lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))):
        model, steps = model_of(make), LocalSGD(steps=3, batch_size=4)
        theta = model.init(torch.Generator().manual_seed(1))[None]
        group = small_group(8, 8)
        found = []
        for seed, order in ((0, (0, 1)), (5, (1, 0))):
            torch.manual_seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            ends = {i: train(model, of_clients([group.clients[i]]), theta, steps).theta for i in order}
            found.append([ends[0], ends[1]])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert model_of(Mixed).draws == ("torch", "numpy", "python")


def test_batch_halves_and_repeated_trainings_draw_differently() -> None:
    model = model_of(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
    group = small_group(8)
    local = LocalTrainer(model, group)
    (batch,) = local.batches(8, [1], "train")
    one, other, _ = local.halves(batch)
    (again,) = LocalTrainer(model, group).batches(8, [1], "train")
    assert len({batch.seed, one.seed, other.seed, again.seed, local.everything()[0].seed}) == 5
    still = LocalTrainer(model_of(Small), group)
    assert next(still.batches(8, [1], "train")).seed is None


DROPS = """
import random
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x):
        h = self.drop(self.first(x).relu())
        return self.last(h * (1 + random.random()) if self.training else h)

def net():
    return Net()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "per-fedavg", "pfedgp"])
def test_a_run_with_draws_is_repeatable_and_resumable(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drops.py").write_text(DROPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    local: dict[str, Any] = {
        "pfedgp": {"steps": 1, "gibbs_steps": 1, "chains": 2},
        "per-fedavg": {"local": {"steps": 2}, "hessian": "finite_difference"},
    }
    keys: dict[str, Any] = {
        "data": data,
        "algorithm": {"name": method, **local.get(method, {"local": {"steps": 2}})},
        "model": {"name": "module", "factory": "drops:net"},
        "report": False,
        "progress": False,
    }
    found = []
    for i, rounds in enumerate((3, 1)):
        torch.manual_seed(i)
        out = tmp_path / f"run{i}"
        run = fedloom.run(TASK, federation__rounds=rounds, out=out, **keys)
        if rounds == 1:
            torch.manual_seed(99)
            run = fedloom.run(TASK, federation__rounds=3, out=out, resume=True, **keys)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        found.append([run.models(client)(x) for client in ("ann", "bob")])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("forks")
def test_draws_are_equal_for_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drops.py").write_text(DROPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    found = []
    for workers in (0, 2):
        run = fedloom.run(
            TASK,
            data=data,
            model={"name": "module", "factory": "drops:net"},
            algorithm={"name": "fedavg", "local": {"steps": 2}},
            runtime__workers=workers,
            out=tmp_path / f"run{workers}",
            report=False,
            progress=False,
        )
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        found.append(run.models("ann")(x))
    assert torch.equal(*found)


def dropping() -> ModuleModel:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(256, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, CLASSES))

    return ModuleModel(make, IMAGE, CLASSES, "pixels")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"pfnm", "fedbn"}))
def test_every_method_trains_a_drawing_module_repeatably(name: str, tmp_path: Path) -> None:
    model, found = dropping(), []
    assert model.draws == ("torch",)
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found.append(made_by(run_method(tmp_path / str(seed), name, model)))
        assert torch.equal(torch.get_rng_state(), state)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())
