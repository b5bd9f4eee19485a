"""The terms of PeFLL's bound against torch.distributions, and its Monte Carlo estimate against exact values."""

from __future__ import annotations

import math

import pytest
import torch
from bounds.pefll import Bound, Networks, Variances, bound, client_term, gaussian_divergence, meta_term, observed
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from fedloom.data.federated import Split
from fedloom.models.embedding import LinearEmbedding
from fedloom.models.hypernetwork import Hypernetwork
from fedloom.models.networks import MLP

SMALL = Variances(1e-16, 1e-16, 1e-16)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made() -> Networks:
    embedding, model = LinearEmbedding(3, 4), MLP((5,), [], 3)
    hypernetwork = Hypernetwork(4, model.layout.size, "S")
    eta_v = embedding.layout.split(embedding.init(seeded(1), torch.float64))
    eta_h = hypernetwork.layout.split(3 * hypernetwork.init(seeded(2), torch.float64))
    return Networks(embedding, hypernetwork, model, eta_v, eta_h, lambda v: 10 * v)


def splits(n: int, m: int = 6) -> list[Split]:
    random = seeded(3)
    x = torch.randn(n, m, 5, generator=random, dtype=torch.float64)
    return [Split(one, torch.randint(3, (m,), generator=random)) for one in x]


def test_the_divergence_follows_the_main_text_and_not_the_appendix() -> None:
    mean, alpha = torch.randn(7, generator=seeded(), dtype=torch.float64), 0.3
    spread = torch.full_like(mean, math.sqrt(alpha))
    q, p = (Independent(Normal(m, spread), 1) for m in (mean, torch.zeros_like(mean)))
    expected = float(kl_divergence(q, p))
    squared = float(mean.square().sum())
    assert gaussian_divergence(squared, alpha) == pytest.approx(expected)
    assert alpha * squared != pytest.approx(expected)


def test_terms_of_the_bound() -> None:
    assert meta_term(10.0, 100, 0.05) == pytest.approx(math.sqrt((10 + math.log(40 / 0.05)) / 200))
    assert client_term(10.0, 4, 25, 0.05) == pytest.approx(math.sqrt((10 + math.log(800 / 0.05) + 1) / 200))
    assert Bound(1, 1, 0.4, 0.0, 0.3, 0.3).vacuous
    assert not Bound(1, 1, 0.4, 0.0, 0.3, 0.2).vacuous


def test_with_narrow_gaussians_losses_equal_those_of_the_means() -> None:
    these, clients = made(), splits(5)
    wrong: list[float] = []
    for split in clients:
        v = these.standardize(these.embedding.describe(these.eta_v, split.x, split.y))
        theta = these.hypernetwork(these.eta_h, v[None])[0]
        wrong.append(float((these.model.logits(theta, split.x).argmax(1) != split.y).double().mean()))
    b = bound(these, clients, SMALL, seeded(), draws=3)
    assert b.empirical == pytest.approx(sum(wrong) / 5)
    assert b.empirical_error == pytest.approx(0, abs=1e-12)
    pairs = [(split, split) for split in clients]
    assert observed(these, pairs, None, seeded()) == pytest.approx(sum(wrong) / 5)
    assert observed(these, pairs, SMALL, seeded()) == pytest.approx(sum(wrong) / 5)
    assert b.vacuous  # such certainty costs ‖η‖²/2α


def test_terms_of_a_bound_match_its_networks() -> None:
    these, clients = made(), [*splits(4), *splits(1, m=9)]
    b = bound(these, clients, Variances(0.5, 2.0, 1e12), seeded(), delta=0.1, draws=2)

    def squared(parameters: dict[str, Tensor]) -> float:
        return sum(float(p.square().sum()) for p in parameters.values())

    divergence = squared(dict(these.eta_h)) / 1.0 + squared(dict(these.eta_v)) / 4.0
    assert b.meta == pytest.approx(meta_term(divergence, 5, 0.1))
    assert b.client == pytest.approx(client_term(0.0, 5, 6, 0.1), rel=1e-6)  # α_θ is so wide that all models are close
    assert (b.clients, b.examples) == (5, 6)
    assert b.empirical == pytest.approx(2 / 3, abs=0.25)  # random guessing


def test_wider_gaussians_cost_less() -> None:
    these, clients = made(), splits(40)
    narrow, wide = (bound(these, clients, Variances(1e-6, 1e-6, a), seeded(), draws=2) for a in (1e-3, 1.0))
    assert wide.client < narrow.client / 10
    assert wide.meta == narrow.meta
    assert bound(these, clients, Variances(1e-5, 1e-5, 1.0), seeded(), draws=1).meta < wide.meta / 2


def test_clients_without_labels_are_rejected() -> None:
    with pytest.raises(ValueError, match="clients"):
        bound(made(), [Split(torch.zeros(2, 5), None)], SMALL, seeded())
