"""Batch normalization whose statistics are part of θ, against torch's own, and in every method."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from every_method import METHODS, SIZES, run
from facts import tells
from federations import CLASSES, IMAGE, clients, group, made_by
from torch import Tensor, nn

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import train
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.errors import ExperimentError
from fedloom.models.flat import bfloat16, masked
from fedloom.models.networks import STATISTICS, BatchNormConvNet

SHAPE, CHANNELS, HIDDEN = (2, 8, 12), [3, 5], [7]
MODEL = BatchNormConvNet(SHAPE, CHANNELS, HIDDEN, 3)
SMALL = BatchNormConvNet(IMAGE, [3], [], CLASSES)


REFUSED = {"apfl", "flowdup", "pfnm", "wga"}


def is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in STATISTICS


def example() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return parameters of which none is zero, images and labels."""
    random = torch.Generator().manual_seed(0)
    theta = MODEL.init(random, torch.float64)
    theta += 0.2 * torch.randn(theta.shape, generator=random, dtype=torch.float64)
    x = 3 * torch.randn(6, *SHAPE, generator=random, dtype=torch.float64) + 1
    return MODEL.layout.leaves(theta, requires_grad=True), x, torch.arange(6) % 3


def torchs(parameters: dict[str, Tensor]) -> nn.Sequential:
    """Build the network of torch's layers; a momentum of 1 keeps the last batch's statistics."""
    depths = [SHAPE[0], *CHANNELS]
    blocks = [
        [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after, momentum=1.0), nn.ReLU()]
        for before, after in pairwise(depths)
    ]
    convolved = [layer for block in blocks for layer in (*block, nn.MaxPool2d(2))]
    linears = [nn.Linear(CHANNELS[-1] * 2 * 3, HIDDEN[0]), nn.Linear(HIDDEN[0], 3)]
    made = nn.Sequential(*convolved, nn.Flatten(), linears[0], nn.ReLU(), linears[1]).double()
    with torch.no_grad():
        for i, (convolution, norm, _) in enumerate(blocks, start=1):
            of = {entry: parameters[f"conv{i}.{entry}"] for entry in ("weight", "gain", "shift", *STATISTICS)}
            convolution.weight.copy_(of["weight"])
            norm.load_state_dict(
                {
                    "weight": 1 + of["gain"],
                    "bias": of["shift"],
                    "running_mean": of["mean"],
                    "running_var": of["log_variance"].exp() - 1e-5,
                    "num_batches_tracked": torch.tensor(0),
                }
            )
        for i, linear in enumerate(linears, start=1):
            linear.load_state_dict({entry: parameters[f"fc{i}.{entry}"] for entry in ("weight", "bias")})
    return made


def test_predictions_equal_torchs_in_evaluation_mode() -> None:
    parameters, x, _ = example()
    expected = torchs(parameters).eval()(x)
    torch.testing.assert_close(MODEL.forward(parameters, x), expected, rtol=1e-10, atol=1e-12)
    # One at a time: a prediction does not depend on other examples.
    alone = torch.cat([MODEL.forward(parameters, one[None]) for one in x])
    torch.testing.assert_close(alone, expected, rtol=1e-10, atol=1e-12)


def test_training_equals_torchs_in_training_mode() -> None:
    """Compare losses, gradients, and a tenth of the way to the batch's statistics, which have no gradient."""
    parameters, x, y = example()
    theirs, before = torchs(parameters).train(), {name: leaf.detach().clone() for name, leaf in parameters.items()}
    expected = F.cross_entropy(theirs(x), y, reduction="none")
    leaves = MODEL.layout.divided(parameters)
    losses = MODEL.in_training().loss(leaves, x, y)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)

    found = dict(zip(leaves, torch.autograd.grad(losses.mean(), list(leaves.values())), strict=True))
    truth = torch.autograd.grad(expected.mean(), list(theirs.parameters()))
    trained = [name for name in parameters if not is_statistic(name)]
    for name, gradient in zip(trained, truth, strict=True):
        assert gradient.abs().max() > 1e-9, f"the test says nothing about {name}"
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10)
    assert set(leaves.buffers) == {name for name in parameters if is_statistic(name)}
    assert not any(b.requires_grad for b in leaves.buffers.values())
    norms = [layer for layer in theirs if isinstance(layer, nn.BatchNorm2d)]
    for i, (norm, pixels) in enumerate(zip(norms, (8 * 12, 4 * 6), strict=True), start=1):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        n = len(x) * pixels
        log_variance = (norm.running_var * (n - 1) / n + norm.eps).log()  # torch keeps the unbiased variance
        for entry, batch in (("mean", norm.running_mean), ("log_variance", log_variance)):
            name = f"conv{i}.{entry}"
            expected = 0.9 * before[name] + 0.1 * batch
            torch.testing.assert_close(leaves.buffers[name], expected, rtol=1e-8, atol=1e-10)


def test_masks_and_bfloat16_work_with_batch_statistics() -> None:
    parameters, x, y = example()
    absent = torch.tensor([False, False, True])
    theirs = torchs(parameters).train()(x).masked_fill(absent, -torch.inf)
    kept = y != 2
    expected = F.cross_entropy(theirs, y, reduction="none")[kept]
    torch.testing.assert_close(
        masked(MODEL.in_training(), absent).loss(parameters, x, y)[kept], expected, rtol=1e-10, atol=1e-12
    )
    single = {name: leaf.detach().float() for name, leaf in parameters.items()}
    rough = bfloat16(MODEL).in_training().loss(single, x.float(), y)
    exact = MODEL.in_training().loss(parameters, x, y)
    torch.testing.assert_close(rough.double(), exact, rtol=0.1, atol=0.1)


def test_statistics_move_by_a_tenth_and_the_server_averages_them(tmp_path: Path) -> None:
    data = clients(SIZES)
    local = {"steps": 1, "batch_size": 3, "lr": 0.25, "momentum": 0.0}
    before = SMALL.layout.split(SMALL.init(torch.Generator().manual_seed(5), torch.float64))
    theta = SMALL.layout.join(before)
    expected = []
    for one in data:
        trained = train(SMALL, group([one]), theta[None], LocalSGD.model_validate(local))
        expected.append(SMALL.layout.split(trained.theta[0])["conv1.mean"])
        assert not torch.equal(expected[-1], before["conv1.mean"])
        drawn = next(batches(len(one.train), 3, 1, group([one]).generator(0, "train")))
        mean = F.conv2d(one.train.x[drawn], before["conv1.weight"], padding=1).mean((0, 2, 3))
        torch.testing.assert_close(expected[-1], 0.1 * mean, rtol=1e-8, atol=1e-12)
    state = made_by(run(tmp_path, "fedavg", SMALL, data, local=local, weighting="uniform"))
    assert state["theta"].shape == theta.shape
    assert SMALL.layout.split(state["theta"])["conv1.mean"].abs().min() > 0


@pytest.mark.parametrize("name", ["fedavg", "pefll", "pfedbayes", "pfedhn", "lg-fedavg"])
def test_methods_transfer_the_statistics(tmp_path: Path, name: str) -> None:
    made = made_by(run(tmp_path, name, SMALL))
    assert all(value.isfinite().all() for value in made.values())
    where = slice(3 * 9 + 2 * 3, 3 * 9 + 3 * 3)  # of the means, after kernel, gain and shift
    personal = [value for key, value in made.items() if key.endswith((".personal.theta", ".personal.mu"))]
    assert len(personal) == len(SIZES)
    shared = [made["theta"]] if "theta" in made and name != "lg-fedavg" else []
    models = personal + shared
    assert all(theta.flatten()[where].abs().min() > 0 for theta in models)


def test_training_clients_together_is_rejected() -> None:
    data = clients(SIZES)
    theta = torch.stack([SMALL.init(torch.Generator().manual_seed(1), torch.float64)] * len(data))
    with pytest.raises(ExperimentError) as error:
        train(SMALL, group(data), theta, LocalSGD(steps=1))
    assert tells(str(error.value), "runtime.clients_at_once", "3", "1")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_method_without_support_for_batch_norm_is_rejected(name: str) -> None:
    method = find_algorithm(name.split()[0])
    with pytest.raises(ExperimentError) as error:
        method.check_model(method.settings.model_validate(METHODS[name]), SMALL)
    assert tells(str(error.value), "model.", method.name)
