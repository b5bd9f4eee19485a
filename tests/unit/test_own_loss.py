"""Every method trains with a model's own loss: label smoothing and a factor, in place of cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from every_method import LOCAL, METHODS, NORMALIZED, PLAIN, SIZES, run
from facts import tells
from federations import CLASSES, IMAGE, clients, federation, group, made_by, setup
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import train
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel, bfloat16
from fedloom.models.networks import MLP, BatchNormConvNet

SEED = 7  # of the federations


class SmoothedLoss(FlatModel):
    """Return twice the cross-entropy with smoothed labels."""

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        assert y is not None
        return smoothed(self.forward(parameters, x), y)


def smoothed(logits: Tensor, y: Tensor) -> Tensor:
    """Compute the loss without PyTorch's option: 2 (0.7 CE + 0.3 mean over classes)."""
    log_p = logits.log_softmax(1)
    return -2 * (0.7 * log_p[torch.arange(len(y)), y] + 0.3 * log_p.mean(1))


class Smoothed(SmoothedLoss, MLP):
    """MLP with that loss."""


class SmoothedNormalized(SmoothedLoss, BatchNormConvNet):
    """Network with normalization layers and that loss."""


OWN = Smoothed(IMAGE, [5], CLASSES)
MODELS: dict[str, tuple[FlatModel, FlatModel]] = {"fedbn": (SmoothedNormalized(IMAGE, [3], [], CLASSES), NORMALIZED)}
"""Models of methods that need normalization layers, with the own loss and with the cross-entropy."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"pfedgp"}))
def test_every_method_trains_with_the_models_own_loss(tmp_path: Path, name: str) -> None:
    """Both the state and each client's personal model differ from those of training with cross-entropy."""
    own, plain = (
        made_by(run(tmp_path / str(i), name, model)) for i, model in enumerate(MODELS.get(name, (OWN, PLAIN)))
    )
    assert own.keys() == plain.keys()
    trained = [key for key in own if key in ("theta", "v", "eta_v", "eta_h.fc1.weight") or ".personal." in key]
    assert len(trained) > len(SIZES) - 1
    chosen = (".labels", ".k", ".mixing", ".scale")  # of kNN-Per, which may be equal
    for key in (key for key in trained if not key.endswith(chosen)):
        assert (own[key] - plain[key]).abs().max() > 1e-6, key


def test_a_method_with_its_own_loss_rejects_it() -> None:
    with pytest.raises(ExperimentError) as error:
        find_algorithm("pfedgp").check_model(None, OWN)
    assert tells(str(error.value), "model.name", "pfedgp", "loss")


def test_fedavg_is_sgd_on_the_custom_loss(tmp_path: Path) -> None:
    data = clients(SIZES)
    f = federation(
        tmp_path,
        find_algorithm("fedavg"),
        s := find_algorithm("fedavg").settings.model_validate({"local": LOCAL, "weighting": "uniform"}),
        setup(OWN),
        data,
    )
    theta = f.state["theta"]
    ends = []
    for c in data:
        p = theta.clone().requires_grad_()
        optimizer = torch.optim.SGD([p], lr=0.05, momentum=0.9)
        for index in batches(len(c.train), 3, 3, generator(SEED, "train/train", c.id, 1)):
            optimizer.zero_grad()
            smoothed(PLAIN.logits(p, c.train.x[index]), c.train.y[index]).mean().backward()
            optimizer.step()
        ends.append(p.detach())
    f.run()
    torch.testing.assert_close(f.state["theta"], torch.stack(ends).mean(0), rtol=0, atol=1e-12)
    assert s.local.momentum == 0.9


def test_pfedbayes_uses_it_as_the_negative_log_likelihood(tmp_path: Path) -> None:
    """Check (27) and (28) by torch.distributions and torch.optim."""
    data, settings = clients(SIZES), METHODS["pfedbayes"]
    method = find_algorithm("pfedbayes")
    f = federation(tmp_path, method, s := method.settings.model_validate(settings), setup(OWN), data)
    start = f.state["v"]

    def divergence(q: Tensor, w: Tensor) -> Tensor:
        return kl_divergence(*(Normal(v[0], F.softplus(v[1])) for v in (q, w))).sum()

    uploads = []
    for c in data:
        q, w = start.clone().requires_grad_(), start.clone().requires_grad_()
        optimizers = torch.optim.Adam([q], lr=0.02), torch.optim.Adam([w], lr=0.01)
        noise, n = generator(SEED, "train/train-noise", c.id, 1), len(c.train)
        for index in batches(n, 3, 3, generator(SEED, "train/train", c.id, 1)):
            theta = q[0] + F.softplus(q[1]) * torch.empty_like(start[0]).normal_(generator=noise)
            nll = smoothed(PLAIN.logits(theta, c.train.x[index]), c.train.y[index])
            (q.grad,) = torch.autograd.grad(n * nll.mean() + s.zeta * divergence(q, w.detach()), [q])
            optimizers[0].step()
            (w.grad,) = torch.autograd.grad(divergence(q.detach(), w), [w])
            optimizers[1].step()
        uploads.append(w.detach())
    f.run()
    torch.testing.assert_close(f.state["v"], torch.stack(uploads).mean(0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", [(9,), (9, 4, 6)], ids=["alone", "stack"])
def test_the_mask_hides_absent_labels_from_it(sizes: tuple[int, ...]) -> None:
    """Use a loss that is finite at -inf, over the two present labels."""

    class Clamped(Smoothed):
        def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
            assert y is not None
            return clamped(self.forward(parameters, x), y)

    def clamped(logits: Tensor, y: Tensor) -> Tensor:
        return 2 * F.cross_entropy(logits, y, reduction="none") + 0.1 * logits.exp().sum(1)

    data, s = clients(sizes), LocalSGD(steps=4, batch_size=4, lr=0.05, mask_absent=True)
    for c in data:
        c.train.y[:] = torch.arange(len(c.train)) % 2
    model = Clamped(IMAGE, [5], CLASSES)
    theta = model.init(torch.Generator().manual_seed(1), torch.float64).expand(len(data), -1)
    found = train(model, group(data), theta, s).theta
    absent = torch.tensor([False, False, True])
    for i, c in enumerate(data):
        p = theta[i].clone().requires_grad_()
        optimizer = torch.optim.SGD([p], lr=0.05, momentum=0.9)
        for index in batches(len(c.train), 4, 4, group([c]).generator(0, "train")):
            optimizer.zero_grad()
            logits = PLAIN.logits(p, c.train.x[index]).masked_fill(absent, -torch.inf)
            clamped(logits, c.train.y[index]).mean().backward()
            optimizer.step()
        torch.testing.assert_close(found[i], p.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", [False, True], ids=["", "masked"])
def test_it_also_applies_to_a_bfloat16_model(mask: bool) -> None:
    """It is close to the same model in float32, and far from the cross-entropy in bfloat16."""
    data, s = clients((9,)), LocalSGD(steps=3, batch_size=9, lr=0.05, mask_absent=mask)
    for part in (data[0].train, data[0].validation, data[0].test):
        part.x.data = part.x.float()
    theta = PLAIN.init(torch.Generator().manual_seed(1))[None]
    ends = {
        name: train(model, group(data), theta, s).theta[0] - theta[0]
        for name, model in (("own", OWN), ("rounded", bfloat16(OWN)), ("other", bfloat16(PLAIN)))
    }
    assert 0 < (ends["rounded"] - ends["own"]).norm() < 0.05 * ends["own"].norm()
    assert (ends["other"] - ends["own"]).norm() > 0.2 * ends["own"].norm()
    assert ends["rounded"].dtype == torch.float32
