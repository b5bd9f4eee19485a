"""pFedGP's Gaussian processes against definitions, brute force and quadrature (Achituve et al., NeurIPS 2021)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from federations import CLASSES, IMAGE, client, group, manifest
from torch import Tensor

from fedloom.algorithms import pfedgp
from fedloom.algorithms.pfedgp import (
    PFEDGP,
    GPTree,
    PFedGPSettings,
    gibbs,
    in_pieces,
    kernel,
    log_sides,
    polya_gamma,
    posterior,
    predictive_loss,
    prior,
    tree,
    unit,
    visit,
)
from fedloom.data.federated import ClientData, Split
from fedloom.engine.run_data import check_clients
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import load_experiment
from fedloom.models.networks import MLP

MODEL = MLP(IMAGE, [5], CLASSES)
THETA = MODEL.init(torch.Generator().manual_seed(3), torch.float64)
BODY = THETA[: MODEL.layout.body_size]


def made(**changes: Any) -> PFedGPSettings:
    return PFedGPSettings.model_validate({"steps": 2, "chains": 4, "chains_predict": 5, "gibbs_steps": 2} | changes)


def points(n: int, f: int = 3, seed: int = 0) -> Tensor:
    return unit(torch.randn(n, f, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def sided(n: int) -> Tensor:
    """Return ±1/2, the sides of n examples in turn."""
    return (torch.arange(n) % 2).double() - 0.5


# --- one Gaussian process ---------------------------------------------------------------------------------------------


def test_the_posterior_matches_the_textbook() -> None:
    """Compute inverses, one chain and one point at a time."""
    s, u, at, kappa = made(), points(6), points(4, seed=1), sided(6)
    omega = torch.rand(3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.01
    k, cross = prior(u, s), kernel(at, u, s)
    mean, variance = posterior(k, cross, s.outputscale, kappa, omega)
    for chain, w in enumerate(omega):
        inverse = torch.linalg.inv(k + torch.diag(1 / w))
        for i, row in enumerate(cross):
            assert mean[chain, i].item() == pytest.approx((row @ inverse @ (kappa / w)).item(), abs=1e-10)
            assert variance[chain, i].item() == pytest.approx((s.outputscale - row @ inverse @ row).item(), abs=1e-10)
    torch.testing.assert_close(k[1, 4], 8 * (-(u[1] - u[4]).square().sum() / 2).exp(), rtol=0, atol=1e-12)
    torch.testing.assert_close(k.diagonal(), torch.full((6,), 8.001, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cached", [1, 72, 2**18])
def test_slopes_of_the_posterior_match_finite_differences(monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    """Compare chains computed one by one, two by two and all at once; K is symmetric."""
    monkeypatch.setattr(pfedgp, "CACHED", cached)
    s, u, at, kappa = made(), points(6), points(4, seed=1), sided(6)
    omega = torch.rand(3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.01
    k, cross = prior(u, s), kernel(at, u, s)
    assert [len(piece) for piece in in_pieces(omega, 6)] == {1: [1, 1, 1], 72: [2, 1], 2**18: [3]}[cached]
    for slopes in itertools.product((True, False), repeat=2):
        if any(slopes):
            inputs = (k.clone().requires_grad_(slopes[0]), cross.clone().requires_grad_(slopes[1]))
            assert torch.autograd.gradcheck(
                lambda k, c: posterior((k + k.T) / 2, c, s.outputscale, kappa, omega), inputs
            )


def test_polya_gamma_draws_have_the_closed_form_moments() -> None:
    """PG(1, c): mean tanh(c/2)/(2c) and variance (sinh c - c) / (4c³ cosh²(c/2)); 1/4 and 1/24 at c = 0."""
    n, random = 40_000, np.random.default_rng(5)
    for c in (0.0, 0.7, -3.0, 6.0):
        mean = 0.25 if c == 0 else math.tanh(c / 2) / (2 * c)
        variance = 1 / 24 if c == 0 else (math.sinh(c) - c) / (4 * c**3 * math.cosh(c / 2) ** 2)
        found = polya_gamma(torch.full((n,), c, dtype=torch.float64), random)
        assert found.mean().item() == pytest.approx(mean, abs=5 * math.sqrt(variance / n))
        assert found.var().item() == pytest.approx(variance, rel=0.1)


def test_side_probabilities_are_averages_of_the_logistic_function() -> None:
    """Compare with a fine sum; the probabilities of both sides add up to 1, and swapping the sides swaps them."""
    mean, variance = torch.tensor([[0.3, -4.0], [2.0, 0.0]]).double(), torch.tensor([[1.0, 6.0], [0.2, 8.0]]).double()
    one, other = log_sides(mean, variance)
    grid = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    weights = (-grid.square() / 2).exp() / (-grid.square() / 2).exp().sum()
    expected = ((mean[..., None] + variance[..., None].sqrt() * grid).sigmoid() * weights).sum(-1).mean(0)
    torch.testing.assert_close(one.exp(), expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(one.exp() + other.exp(), torch.ones(2).double(), rtol=0, atol=1e-12)
    swapped = log_sides(-mean, variance)
    torch.testing.assert_close(swapped[0], other, rtol=0, atol=1e-12)


def test_chains_predict_as_summing_over_all_functions() -> None:
    """Three examples, and p(side at a point | sides) by quadrature over f in three dimensions, without any ω."""
    s, u, at, kappa = made(outputscale=2.0), points(3), points(2, seed=1), sided(3)
    k, cross = prior(u, s), kernel(at, u, s)
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(30))
    index = torch.tensor(list(itertools.product(range(30), repeat=3)))
    f = nodes[index] @ torch.linalg.cholesky(k).T
    likely = weights[index].prod(1) * (2 * kappa * f).sigmoid().prod(1)
    inverse = torch.linalg.inv(k)
    deviation = (2.0 - (cross @ inverse * cross).sum(1)).sqrt()
    there = (f @ inverse @ cross.T)[..., None] + deviation[:, None] * nodes
    expected = (likely[:, None] * (there.sigmoid() * weights).sum(-1)).sum(0) / likely.sum() / weights.sum()
    omega = gibbs(k, kappa, 4000, 6, np.random.default_rng(1))
    found = log_sides(*posterior(k, cross, 2.0, kappa, omega))[0].exp()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)
    assert (expected - 0.5).abs().max() > 0.05


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_the_tree_splits_the_farthest_classes() -> None:
    """Use classes at 0, 1, 10 and 11 on a line, and one that does not occur."""
    y = torch.tensor([0, 1, 3, 4, 0, 4])
    z = torch.tensor([0.0, 10.0, 1.0, 11.0, 0.2, 11.2])[:, None]
    assert tree(z, y, 5).tolist() == [[1, -1, 0, 1, -1], [1, 0, 0, -1, 0], [0, 1, 0, 0, -1]]
    assert tree(z * 0, y, 5).tolist() == [[1, -1, 0, 1, 1], [1, 0, 0, -1, 1], [1, 0, 0, 0, -1]]  # all equal
    order = torch.tensor([5, 2, 0, 4, 3, 1])
    assert torch.equal(tree(z[order], y[order], 5), tree(z, y, 5))
    assert tree(z[:1], y[:1], 5).shape == (0, 5)


# --- training ---------------------------------------------------------------------------------------------------------


def test_the_gradient_matches_finite_differences() -> None:
    """ω is a constant in the gradient, so the loss is compared with the same draws of ω."""
    s, y = made(), torch.tensor([0, 1, 2, 0, 1, 2, 2, 0])
    z = torch.randn(8, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    splits = tree(z, y, 3)
    omegas: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        """Return the loss for ω drawn at z, by a loop over splits."""
        random, total = np.random.default_rng(9), x.new_zeros(())
        for number, split in enumerate(splits):
            side, u = split[y], unit(x)
            reported, asked = [], []
            for which in (1, -1):
                members = torch.from_numpy(random.permutation((side == which).nonzero()[:, 0].numpy()))
                asked.append(members[: len(members) // 2])
                reported.append(members[len(members) // 2 :])
            t, q = torch.cat(reported), torch.cat(asked)
            drawn = gibbs(prior(u[t], s).detach(), side[t].double() / 2, s.chains, s.gibbs_steps, random)
            if len(omegas) == number:
                omegas.append(drawn)
            inverse = torch.linalg.inv(prior(u[t], s) + torch.diag_embed(1 / omegas[number]))
            cross, target = kernel(u[q], u[t], s), (side[t] / 2 / omegas[number])[:, :, None]
            mean = (cross @ inverse @ target)[..., 0]
            variance = s.outputscale - (cross @ inverse * cross).sum(-1)
            total = total - torch.where(side[q] > 0, *log_sides(mean, variance)).mean()
        return total

    x = z.clone().requires_grad_()
    found = predictive_loss(x, y, splits, s, np.random.default_rng(9))
    assert found.item() == pytest.approx(loss(z).item(), abs=1e-10)
    (gradient,) = torch.autograd.grad(found, x)
    for i, j in itertools.product(range(8), range(3)):
        change = torch.zeros_like(z)
        change[i, j] = 1e-5
        slope = (loss(z + change) - loss(z - change)) / 2e-5
        assert gradient[i, j].item() == pytest.approx(slope.item(), abs=1e-7)
    assert gradient.abs().max() > 1e-3


def test_a_visit_is_torchs_sgd_on_that_loss() -> None:
    s, c = made(steps=3, clip=None), client("c0", 9)
    trained = visit(MODEL, group([c]), 0, BODY[None], s)
    p, losses = BODY.clone().requires_grad_(), []
    optimizer = torch.optim.SGD([p], lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
    random = np.random.default_rng(int(torch.randint(2**62, (1,), generator=group([c]).generator(0, "gp"))))
    head = torch.zeros(len(THETA) - len(BODY), dtype=torch.float64)
    splits = None
    for _ in range(3):
        z = MODEL.features(MODEL.layout.split(torch.cat([p, head])), c.train.x)
        splits = tree(z.detach(), c.train.y, CLASSES) if splits is None else splits
        loss = predictive_loss(z, c.train.y, splits, s, random)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(trained.theta[0], p.detach(), rtol=0, atol=1e-12)
    assert trained.loss.item() == pytest.approx(sum(losses) / 3)
    assert (trained.steps.item(), trained.theta.equal(BODY[None])) == (3, False)
    tiny = visit(MODEL, group([c]), 0, BODY[None], made(clip=1e-3, steps=1))
    assert (tiny.theta[0] - BODY).norm().item() == pytest.approx(s.lr * 1e-3, rel=1e-2)


def test_without_held_out_examples_nothing_changes() -> None:
    """With one example of each of two classes all are for fitting, none is predicted."""
    assert torch.equal(visit(MODEL, group([client("c0", 2)]), 0, BODY[None], made(weight_decay=0.0)).theta[0], BODY)


# --- results of a client ----------------------------------------------------------------------------------------------


def apart(n: int, classes: tuple[int, ...]) -> ClientData:
    """Return examples with an obvious class: each class has separate pixels."""
    y = torch.tensor(classes).repeat(n)[:n]
    x = torch.rand(n, *IMAGE, generator=torch.Generator().manual_seed(n), dtype=torch.float64) * 0.1
    x.flatten(1)[torch.arange(n), y] += 5
    return ClientData("c", Split(x, y), Split(x, y), Split(x, y), CLASSES)


@pytest.mark.parametrize("classes", [(0, 2), (2, 0), (0, 1, 2)])
def test_separated_classes_are_predicted(classes: tuple[int, ...]) -> None:
    """All new examples are classified correctly; absent classes have probability 0, rows sum to 1."""
    body = torch.zeros_like(BODY)
    body[: 5 * 256].view(5, 256)[torch.arange(3), torch.arange(3)] = 1.0
    (named,) = PFEDGP.personalize(
        MODEL, group([apart(30, classes)]), body[None], made(chains_predict=20, gibbs_steps=5)
    )
    new = apart(31, classes).train
    p = named["personal"].probabilities(new.x)
    assert torch.equal(p.argmax(1), new.y)
    torch.testing.assert_close(p.sum(1), torch.ones(31, dtype=torch.float64), rtol=0, atol=1e-12)
    absent = [c for c in range(CLASSES) if c not in classes]
    assert not p[:, absent].any()


def test_a_single_class_is_certain_and_cannot_train() -> None:
    """Such a client is rejected before training, by the manifest, and by its own worker."""
    c = apart(6, (1,))
    (named,) = PFEDGP.personalize(MODEL, group([c]), BODY[None], made())
    assert torch.equal(named["personal"].probabilities(c.test.x), torch.tensor([0.0, 1.0, 0.0]).double().expand(6, 3))
    with pytest.raises(DataError, match=r"c: .*one class"):
        visit(MODEL, group([c]), 0, BODY[None], made())


def test_a_seen_client_with_one_class_is_rejected_before_training(tmp_path: Path) -> None:
    """By its counts in the manifest; a client that does not train may have one class."""
    tree = {
        "name": "one-class",
        "data": {"dataset": "fashion-mnist", "partition": {"scheme": "classes", "clients": 3, "classes_per_client": 1}},
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": "pfedgp"},
        "federation": {"rounds": 1, "clients_per_round": 2},
    }
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree))
    experiment = load_experiment(tmp_path / "one.yaml")
    data = [client("c0", 4), replace(apart(6, (1,)), id="c1")]
    with pytest.raises(ExperimentError, match=r"pfedgp .*\bc1\b.*one class"):
        check_clients(experiment, manifest(data).clients)
    check_clients(experiment, manifest(data, unseen=["c1"]).clients)


def test_the_saved_state_reproduces_predictions() -> None:
    c = client("c0", 9)
    personal = PFEDGP.personalize(MODEL, group([c]), BODY[None], made())[0]["personal"]
    assert isinstance(personal, GPTree)
    saved = {name: tensor.clone() for name, tensor in personal.tensors().items()}
    other = PFEDGP.personalize(MODEL, group([client("c0", 9, seed=8)]), BODY[None] * 2, made())[0]["personal"]
    assert torch.equal(other.predict(saved, c.test.x), personal.log_probabilities(c.test.x))


def test_too_large_clients_are_rejected() -> None:
    assert PFEDGP.check_client(made(max_examples=8), 8, 2) is None
    with pytest.raises(DataError, match=r"c0: .*\b9\b.*algorithm\.max_examples \(8\)"):
        PFEDGP.personalize(MODEL, group([client("c0", 9)]), BODY[None], made(max_examples=8))


def test_a_model_of_one_layer_is_rejected() -> None:
    with pytest.raises(ExperimentError, match=r"model\.name: pfedgp .*one layer"):
        PFEDGP.check_model(made(), MLP(IMAGE, [], CLASSES))
