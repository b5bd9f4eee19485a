"""Exported models reproduce the evaluated metrics: numbers, masks, frozen parts and batch normalization."""

from __future__ import annotations

import csv
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from facts import tells
from torch import nn

import fedloom

pytestmark = pytest.mark.slow  # torch.export takes seconds

N = 40
RNG = np.random.default_rng(1)
ROWS = RNG.normal(2, 3, (2 * N, 4)).astype(np.float32)
IMAGES = RNG.integers(0, 256, (2 * N, 3, 8, 8), dtype=np.uint8)
MASKS = np.where(RNG.random((2 * N, 8, 8)) < 0.1, 255, IMAGES[:, 0] // 100).astype(np.uint8)
PRICES = ROWS @ np.array([4.0, -2.0, 1.0, 3.0]) * 1000 + 5000


def frozen() -> nn.Module:
    """Return a head on a frozen backbone with running statistics."""
    backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    backbone.requires_grad_(requires_grad=False)
    return nn.Sequential(backbone, nn.Linear(8, 1))


def normalized() -> nn.Module:
    """Return a dense network with batch normalization."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def convolutions() -> nn.Module:
    """Return a network of convolutions with batch normalization."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))


def rmse(found: torch.Tensor, y: torch.Tensor) -> float:
    """Return the root of the mean squared error."""
    return float((found[:, 0].double() - y.double()).square().mean().sqrt())


def mean_iou(found: torch.Tensor, y: torch.Tensor) -> float:
    """Return the mean over classes of intersection over union, of pixels with a class."""
    counted = y != 255
    predicted, true = found.argmax(1)[counted], y[counted]
    both = [((predicted == c) & (true == c), (predicted == c) | (true == c)) for c in range(3)]
    return float(np.mean([float(one.sum() / either.sum()) for one, either in both if either.any()]))


def accuracy(found: torch.Tensor, y: torch.Tensor) -> float:
    """Return the fraction of right classes."""
    return float((found.argmax(1) == y).double().mean())


def taken() -> nn.Module:
    """Return a network whose layers have names of attributes of exported programs."""
    return nn.Sequential(OrderedDict(code=nn.Linear(4, 8), graph=nn.BatchNorm1d(8), meta=nn.Linear(8, 2)))


def counting() -> nn.Module:
    """Return a network of logarithms of counts."""
    made = nn.Linear(4, 1)
    made.loss = nn.PoissonNLLLoss()
    return made


class TiedTokens(nn.Module):
    """Language model with one table for its input and its output, and a function that ONNX does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lm_head(torch.special.bessel_j0(self.embed(x)))
        return found


CASES: dict[str, tuple[Any, Any, nn.Module, Any]] = {
    "accuracy of layers named code": (ROWS, (ROWS[:, 0] > 2).astype(int), taken(), accuracy),
    "rmse of counts": (ROWS, RNG.poisson(np.exp(ROWS[:, 0] / 4)).astype(np.float32), counting(), rmse),
    "rmse": (ROWS, PRICES, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), rmse),
    "rmse of a frozen backbone": (ROWS, PRICES, frozen(), rmse),
    "mean_iou": (IMAGES, MASKS, convolutions(), mean_iou),
    "accuracy": (ROWS, (ROWS[:, 0] > 2).astype(int), normalized(), accuracy),
}


@pytest.mark.parametrize("case", list(CASES))
def test_exported_models_reproduce_the_evaluation(case: str, tmp_path: Path) -> None:
    x, y, model, metric = CASES[case]
    clients = {name: (x[rows], y[rows]) for name, rows in (("a", slice(0, N)), ("b", slice(N, None)))}
    keys = {"task": "regression"} if metric is rmse else {}
    data = fedloom.Federated.from_arrays(clients, root=tmp_path / "data", held_out_fraction=0.0, **keys)
    experiment = {
        "name": "exports",
        "data": data,
        "algorithm": {"name": "fedavg", "local": {"steps": 5, "batch_size": 8, "lr": 0.05}, "personalize_steps": 4},
        "federation": {"rounds": 3, "clients_per_round": 2},
        "runtime": {"workers": 0},
    }
    run = fedloom.run(experiment, model=model, out=tmp_path / "run", report=False, progress=False)
    with (tmp_path / "run" / "clients.csv").open() as file:
        measured = {row["id"]: row for row in csv.DictReader(file)}
    dataset = data.open()
    for client in dataset.manifest.roster:
        tensors = dataset.tensors(client)
        predictors: list[Any] = [run.models(client)]
        if client == dataset.manifest.roster[-1]:  # an export takes a second
            predictors[0].save(tmp_path / "m.pt2")
            predictors.append(torch.export.load(tmp_path / "m.pt2").module())
        for predict in predictors:
            found = metric(predict(tensors["test_x"]).detach(), tensors["test_y"])
            expected = float(measured[client][f"personal_{case.split()[0]}_unmasked"])
            assert found == pytest.approx(expected, rel=1e-4)


def test_weights_of_a_tied_head_say_how_to_load_them(tmp_path: Path) -> None:
    clients = {name: (TOKENS[rows], TOKENS[rows]) for name, rows in (("a", slice(0, N)), ("b", slice(N, None)))}
    data = fedloom.Federated.from_arrays(clients, root=tmp_path / "data", held_out_fraction=0.0, task="next_token")
    experiment = {
        "name": "tied",
        "data": data,
        "algorithm": {"name": "fedavg", "local": {"steps": 2, "batch_size": 8, "lr": 0.05}},
        "federation": {"rounds": 1, "clients_per_round": 2},
        "runtime": {"workers": 0},
    }
    run = fedloom.run(experiment, model=TiedTokens(), out=tmp_path / "run", report=False, progress=False)
    made = run.models("a")
    made.save(tmp_path / "m.safetensors")
    weights = safetensors.torch.load_file(tmp_path / "m.safetensors")
    (line,) = re.findall(r"`(weights\[.*?)`", (tmp_path / "m.md").read_text().split("several names")[1])
    name, first = re.findall(r'"(.*?)"', line)
    weights[name] = weights[first]
    net = TiedTokens().eval()
    net.load_state_dict(weights)
    x = torch.from_numpy(TOKENS[:4])
    torch.testing.assert_close(net(x).softmax(-1), made(x))
    pytest.importorskip("onnxscript")
    with pytest.raises(fedloom.errors.ExperimentError) as refused:
        made.save(tmp_path / "m.onnx")
    assert tells(str(refused.value), "ONNX", "bessel_j0")
    assert not {"\x1b", "\\x1b"} & set(str(refused.value).split("["))


class Mixed(nn.Module):
    """Numbers from measurements and codes, with random draws in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.out = nn.Embedding(9, 2), nn.Dropout(0.2), nn.Linear(4 + 6, 2)

    def forward(self, row: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        numbers: torch.Tensor = self.out(self.drop(torch.cat([row, self.embed(codes).flatten(1)], 1)))
        return numbers


CODES = RNG.integers(0, 9, (2 * N, 3))
LABELS = (ROWS[:, :3] > 2).astype(np.int64)
TOKENS = RNG.integers(0, 20, (2 * N, 6))
EXPORTED: dict[str, tuple[Any, Any, nn.Module, tuple[int, ...]]] = {
    "regression": (ROWS, PRICES, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), (1,)),
    "frozen": (ROWS, PRICES, frozen(), (1,)),
    "multilabel": (ROWS, LABELS, nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), (3,)),
    "segmentation": (IMAGES, MASKS, convolutions(), (3, 8, 8)),
    "next token": (TOKENS, TOKENS, nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)), (6, 20)),
    "named inputs": ({"row": ROWS, "codes": CODES}, np.stack([PRICES, -PRICES], 1), Mixed(), (2,)),
}


QUICK = ("multilabel", "named inputs")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.exhaustive) for case in EXPORTED]
)
def test_models_of_every_task_predict_the_same_in_torch_and_onnx(case: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
    pytest.importorskip("onnxscript")
    x, y, model, shape = EXPORTED[case]

    def some(rows: slice) -> Any:
        return {name: each[rows] for name, each in x.items()} if isinstance(x, dict) else x[rows]

    clients = {name: (some(rows), y[rows]) for name, rows in (("a", slice(0, N)), ("b", slice(N, None)))}
    experiment = {
        "name": "exports",
        "data": fedloom.Federated.from_arrays(clients, root=tmp_path / "data", held_out_fraction=0.0),
        "algorithm": {"name": "fedavg", "local": {"steps": 5, "batch_size": 8, "lr": 0.05}},
        "federation": {"rounds": 2, "clients_per_round": 2},
        "runtime": {"workers": 0},
    }
    run = fedloom.run(experiment, model=model, out=tmp_path / "run", report=False, progress=False)
    made = run.models("a")
    for suffix in ("pt2", "onnx"):
        made.save(tmp_path / f"m.{suffix}")
    program = torch.export.load(tmp_path / "m.pt2").module()
    written = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(written)
    for rows in (slice(0, 1), slice(3, 8)):  # any batch size
        raw = some(rows)
        tensors = (
            {name: torch.from_numpy(each) for name, each in raw.items()}
            if isinstance(raw, dict)
            else torch.from_numpy(raw)
        )
        expected = made(tensors)
        assert expected.shape == (len(y[rows]), *shape)
        assert torch.allclose(program(tensors), expected, rtol=1e-4, atol=1e-5)
        (found,) = evaluator(written).run(["output"], raw if isinstance(raw, dict) else {"x": raw})
        assert np.allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)
