"""IVON as the optimizer of pFedBayes' q_i, against its update rules in (mean, Hessian) and the authors' package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import clients, federation, setup, surprise
from pydantic import ValidationError
from test_pfedbayes import SEED, SIZES, close, divergence, made, some
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.mean_field import MeanField, by_ivon, inverse_softplus
from fedloom.algorithms.pfedbayes import PFEDBAYES, PFedBayesSettings
from fedloom.data.federated import ClientData
from fedloom.federation.randomness import generator

IVON = {"optimizer": "ivon", "lr_personal": 0.3, "betas": [0.8, 0.95]}


class Hessian:
    """Algorithm 1 of arXiv 2402.17641 with a prior N(μ_w, σ_w²) in place of N(0, 1/(λδ)): m, h and the momentum."""

    def __init__(self, v: Tensor, n: int, s: PFedBayesSettings) -> None:
        assert s.betas is not None
        self.size, self.lr, (self.beta1, self.beta2) = n / s.zeta, s.lr_personal, s.betas
        self.m, self.variance = v[0], F.softplus(v[1]).square()
        self.g, self.t = torch.zeros_like(self.m), 0

    def sample(self, noise: Tensor) -> Tensor:
        return self.m + self.variance.sqrt() * noise

    def step(self, samples: list[tuple[Tensor, Tensor]], prior: Tensor) -> None:
        """Make a step from these samples and the gradients of the mean loss at them."""
        delta = 1 / (self.size * F.softplus(prior[1]).square())
        h = 1 / (self.size * self.variance) - delta
        gradient = torch.stack([g for _, g in samples]).mean(0)
        estimate = torch.stack([g * (theta - self.m) for theta, g in samples]).mean(0) / self.variance
        self.t += 1
        self.g = self.beta1 * self.g + (1 - self.beta1) * gradient
        new = self.beta2 * h + (1 - self.beta2) * estimate
        new = new + 0.5 * (1 - self.beta2) ** 2 * (h - estimate) ** 2 / (h + delta)
        up = self.g / (1 - self.beta1**self.t) + delta * (self.m - prior[0])
        self.m = self.m - self.lr * up / (new + delta)
        self.variance = 1 / (self.size * (new + delta))

    @property
    def v(self) -> Tensor:
        return torch.stack([self.m, inverse_softplus(self.variance.sqrt())])


def visit(s: PFedBayesSettings, p: Setup, start: Tensor, v: Tensor, c: ClientData, t: int) -> tuple[Tensor, Tensor]:
    """Run one visit: q by IVON, w by torch's Adam."""
    n, q, w = len(c.train), Hessian(start, len(c.train), s), v.clone().requires_grad_()
    adam, draws = torch.optim.Adam([w], lr=s.lr_global), generator(SEED, "train/train-noise", c.id, t)
    for index in batches(n, s.batch_size, s.steps, generator(SEED, "train/train", c.id, t)):
        samples = []
        for _ in range(s.samples):
            theta = q.sample(torch.empty_like(v[0]).normal_(generator=draws)).requires_grad_()
            loss = surprise(p.model.logits(theta, c.train.x[index]), c.train.y[index]) / len(index)
            samples.append((theta.detach(), torch.autograd.grad(loss, theta)[0]))
        q.step(samples, w.detach())
        (w.grad,) = torch.autograd.grad(divergence(q.v, w), [w])
        adam.step()
    return q.v, w.detach()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.usefixtures("each_task")
def test_rounds_follow_means_and_hessians(tmp_path: Path, samples: int) -> None:
    s, p, data = made(samples=samples, **IVON), setup(), clients(SIZES)
    run = federation(tmp_path, PFEDBAYES, s, p, data, rounds=2)
    v = run.state["v"]
    kept = {c.id: v for c in data}
    for t in (1, 2):
        uploads = []
        for c in data:
            kept[c.id], localized = visit(s, p, kept[c.id], v, c, t)
            uploads.append(localized)
        v = torch.stack(uploads).mean(0)
    run.run()
    close(run.state["v"], v, atol=1e-9)
    for c in data:
        tensors = run.predictors[2, c.id]["personal"].tensors()
        close(torch.stack([tensors["mu"], tensors["rho"]]), kept[c.id], atol=1e-9)


@pytest.mark.parametrize("draws", [1, 2])
def test_steps_equal_those_of_the_authors_package(draws: int) -> None:
    """The package's prior has mean 0 and one deviation, so the test uses such a prior for pFedBayes."""
    ivon = pytest.importorskip("ivon")
    n, zeta, lr, h = 40, 2.5, 0.2, 0.75  # the package rounds h to float32
    prior = torch.stack([torch.zeros(6), torch.full((6,), -0.4)]).double()
    delta = zeta / (n * float(F.softplus(prior[1, 0])) ** 2)
    m = torch.nn.Parameter(some(seed=3)[0])
    theirs = ivon.IVON(
        [m],
        lr,
        ess=n / zeta,
        hess_init=h,
        beta1=0.8,
        beta2=0.95,
        weight_decay=delta,
        mc_samples=draws,
        rescale_lr=False,
    )
    sigma = torch.full((6,), (zeta / (n * (h + delta))) ** 0.5, dtype=torch.float64)
    q, w = MeanField(torch.stack([m.detach().clone(), inverse_softplus(sigma)])), MeanField(prior)
    step = by_ivon(q, w, lr, zeta, (0.8, 0.95))
    target = some(seed=4)[1]
    for _ in range(12):
        before, d_mu, d_sigma = m.detach().clone(), torch.zeros(6).double(), torch.zeros(6).double()
        for _ in range(draws):
            with theirs.sampled_params(train=True):
                theta = m.detach().clone()
                m.grad = ((theta - target) ** 3 + theta.sin()).detach()
            d_mu += n * m.grad / draws
            d_sigma += n * m.grad * (theta - before) / q.sigma / draws
        theirs.step()
        step(d_mu, d_sigma)
        close(q.mu, m.detach())
        close(q.sigma, (zeta / (n * (theirs.param_groups[0]["hess"] + delta))).sqrt())


def test_the_variance_converges_to_the_inverse_hessian() -> None:
    """Check a quadratic loss: at its minimum 1/σ² is n/ζ times its curvature, plus that of the prior."""
    n, zeta, prior = 50, 2.0, some(seed=5)
    a, target = torch.linspace(0.5, 3, 6).double(), some(seed=6)[0]
    q, w, random = MeanField(prior), MeanField(prior), torch.Generator().manual_seed(1)
    step = by_ivon(q, w, 0.1, zeta, (0.9, 0.99))
    means = []
    for t in range(3000):
        noise = torch.randn(256, 6, generator=random, dtype=torch.float64)
        g = a * (q.sample(noise) - target)
        step(n * g.mean(0), n * (g * noise).mean(0))
        if t >= 2000:
            means.append(torch.stack([q.mu, q.sigma**-2]))
    precision = n / zeta * a + w.sigma**-2
    mean = (n / zeta * a * target + w.mu * w.sigma**-2) / precision
    found = torch.stack(means).mean(0)
    torch.testing.assert_close(found[1], precision, rtol=0.02, atol=0)
    torch.testing.assert_close(found[0], mean, rtol=0, atol=0.01)


def test_without_a_gradient_at_the_prior_nothing_moves() -> None:
    w = MeanField(some(seed=7).float())
    q, zeros = MeanField(w.v), torch.zeros(6)
    step = by_ivon(q, w, 0.5, 3.0, (0.9, 0.5))
    for _ in range(5):
        step(zeros.clone(), zeros.clone())
    assert torch.equal(q.v, w.v)


@pytest.mark.parametrize(
    ("keys", "reported"),
    [
        ({"zeta": 0.0}, "zeta"),
        ({"noise": 0.5}, "noise"),
        ({"moments": "kept"}, "moments"),
        ({"optimizer": "adam"}, "betas"),
        ({"betas": [0.9]}, "betas"),
        ({"betas": [0.9, 1.0]}, "betas"),
    ],
)
def test_settings_unsupported_by_ivon_are_rejected(keys: dict[str, Any], reported: str) -> None:
    with pytest.raises(ValidationError, match=reported):
        made(**{**IVON, **keys})
