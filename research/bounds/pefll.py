"""Generalization bound of PeFLL, evaluated on a trained run (papers/001, Theorem 3.2 and Theorem B.1).

With probability 1 - δ over n clients of m examples each, for all η_h and η_v at once:

    E loss on a future client  ≤  mean loss on the clients' own data
                                 + √((‖η_h‖²/2α_h + ‖η_v‖²/2α_v + log(4√n/δ)) / 2n)
                                 + E √((Σ_i ‖h(v_i)‖²/2α_θ + log(8mn/δ) + 1) / 2mn)                        (eq. 3)

where networks and models are drawn: η̄_h ~ N(η_h, α_h I), η̄_v ~ N(η_v, α_v I), f ~ N(h(v(S_i; η̄_v); η̄_h), α_θ I).

Three remarks (docs/theory.md). The divergence of N(η, αI) from N(0, αI) is ‖η‖²/2α, as in eq. 3; the end of
appendix B says α‖η‖², which is wrong. Eq. 3 writes the loss of the mean model h(v), whereas Theorem B.1, from which it
follows, has that of a model drawn from the client's Gaussian, as does this module. The loss must be bounded: it is the
0-1 loss, M = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.data.federated import Split
from fedloom.data.inputs import single
from fedloom.models.embedding import EmbeddingNetwork
from fedloom.models.flat import FlatModel
from fedloom.models.hypernetwork import Hypernetwork

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Networks:
    """Networks of a trained PeFLL, their parameters by name, and the transformation of descriptors between them."""

    embedding: EmbeddingNetwork
    hypernetwork: Hypernetwork
    model: FlatModel
    eta_v: Named
    eta_h: Named
    standardize: Callable[[Tensor], Tensor] = lambda v: v


@dataclass(frozen=True)
class Variances:
    """Variances α_h, α_v, α_θ of the three Gaussians."""

    h: float
    v: float
    theta: float


@dataclass(frozen=True)
class Bound:
    """Right-hand side of eq. 3, term by term; all terms are fractions.

    Attributes
    ----------
    clients, examples
        n; m, the smallest train split (the theorem assumes equal sizes; larger ones can only help).
    empirical
        Mean 0-1 loss of the drawn models on the train splits, averaged over draws.
    empirical_error
        Standard error of ``empirical`` over the draws of the networks.
    meta
        Term of η_h and η_v: the complexity of what is learned across clients.
    client
        Term of the clients' models.
    """

    clients: int
    examples: int
    empirical: float
    empirical_error: float
    meta: float
    client: float

    @property
    def total(self) -> float:
        """Sum of the three terms, the bound."""
        return self.empirical + self.meta + self.client

    @property
    def vacuous(self) -> bool:
        """True if the bound is trivial, since a 0-1 loss is at most 1."""
        return self.total >= 1


def gaussian_divergence(mean: float | Tensor, variance: float) -> float:
    """Return KL(N(η, αI) ‖ N(0, αI)) = ‖η‖²/2α, given ‖η‖² (papers/001, eq. 3)."""
    return float(mean) / (2 * variance)


def meta_term(divergence: float, clients: int, delta: float) -> float:
    """Return √((KL + log(4√n/δ)) / 2n) (papers/001, eq. 6, second term, M = 1)."""
    return math.sqrt((divergence + math.log(4 * math.sqrt(clients) / delta)) / (2 * clients))


def client_term(divergence: float, clients: int, examples: int, delta: float) -> float:
    """Return √((Σ KL_i + log(8mn/δ) + 1) / 2mn) (papers/001, eq. 6, third term, M = 1)."""
    size = examples * clients
    return math.sqrt((divergence + math.log(8 * size / delta) + 1) / (2 * size))


def bound(
    networks: Networks,
    clients: Sequence[Split],
    variances: Variances,
    generator: torch.Generator,
    *,
    delta: float = 0.05,
    draws: int = 5,
) -> Bound:
    """Evaluate the right-hand side of eq. 3 by Monte Carlo.

    Parameters
    ----------
    clients
        Labelled train splits of n seen clients. The bound holds for all η at once, so it holds for any n of them.
    draws
        Number of draws of the networks; each draws one model per client.

    Raises
    ------
    ValueError
        If a client has no examples or no labels, or there are no clients.
    """
    if not clients or any(split.y is None or not len(split) for split in clients):
        raise ValueError("clients must be one or more train splits with labelled examples")
    n, m = len(clients), min(len(split) for split in clients)
    losses, thirds = [], []
    for _ in range(draws):
        theta = _models(networks, clients, variances, generator)
        thirds.append(client_term(gaussian_divergence(theta.double().square().sum(), variances.theta), n, m, delta))
        losses.append(sum(_errors(networks.model, theta, clients, variances, generator)) / n)
    divergence = gaussian_divergence(_squared(networks.eta_h), variances.h)
    divergence += gaussian_divergence(_squared(networks.eta_v), variances.v)
    mean = sum(losses) / draws
    spread = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / max(1, draws - 1) / draws)
    return Bound(n, m, mean, spread, meta_term(divergence, n, delta), sum(thirds) / draws)


def observed(
    networks: Networks,
    clients: Sequence[tuple[Split, Split]],
    variances: Variances | None,
    generator: torch.Generator,
    draws: int = 5,
) -> float:
    """Return the mean 0-1 loss on the test splits of clients whose descriptors come from their train splits.

    Parameters
    ----------
    clients
        Train and test split of each; unseen clients give an estimate of the left-hand side of eq. 3.
    variances
        None for the mean networks and models, with which PeFLL predicts.
    """
    trains, tests = [train for train, _ in clients], [test for _, test in clients]
    found = []
    for _ in range(draws if variances is not None else 1):
        theta = _models(networks, trains, variances, generator)
        found.append(sum(_errors(networks.model, theta, tests, variances, generator)) / len(tests))
    return sum(found) / len(found)


def _models(n: Networks, clients: Sequence[Split], variances: Variances | None, generator: torch.Generator) -> Tensor:
    """Return h(v(S_i; η̄_v); η̄_h) for one draw of the networks, ``[clients, d]``."""
    eta_v, eta_h = n.eta_v, n.eta_h
    if variances is not None:
        eta_v, eta_h = _drawn(eta_v, variances.v, generator), _drawn(eta_h, variances.h, generator)
    with torch.no_grad():
        v = torch.stack([n.embedding.describe(eta_v, single(split.x), split.y) for split in clients])
    return n.hypernetwork(eta_h, n.standardize(v))


def _errors(
    model: FlatModel, theta: Tensor, splits: Sequence[Split], variances: Variances | None, generator: torch.Generator
) -> list[float]:
    """Return the mean 0-1 loss of each client's model, or of one drawn around it."""
    errors = []
    for mean, split in zip(theta, splits, strict=True):
        drawn = mean if variances is None else mean + math.sqrt(variances.theta) * _noise(mean, generator)
        with torch.no_grad():
            predicted = model.logits(drawn, single(split.x)).argmax(1)
        assert split.y is not None
        errors.append(float(predicted.ne(split.y).double().mean()))
    return errors


def _drawn(parameters: Named, variance: float, generator: torch.Generator) -> dict[str, Tensor]:
    return {name: p + math.sqrt(variance) * _noise(p, generator) for name, p in parameters.items()}


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def _squared(parameters: Named) -> float:
    """Return ‖η‖²."""
    return sum(float(p.double().square().sum()) for p in parameters.values())
