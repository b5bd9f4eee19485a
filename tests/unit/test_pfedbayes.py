"""pFedBayes against torch.distributions, autograd and closed forms (papers/003)."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from federations import CLASSES, IMAGE, client, clients, close, federation, setup, surprise
from pydantic import ValidationError
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fedloom.algorithms.base import Round, Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.mean_field import (
    MeanField,
    add_posterior_gradient,
    gaussian,
    inverse_softplus,
    matched_moments,
    prior_gradient,
    softplus,
)
from fedloom.algorithms.pfedbayes import (
    PFEDBAYES,
    GlobalGaussian,
    PFedBayesClient,
    PFedBayesServer,
    PFedBayesSettings,
    Prior,
)
from fedloom.data.federated import ClientData, Split
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator
from fedloom.messages import Replies
from fedloom.models.flat import FlatModel, Layout
from fedloom.models.networks import MLP
from fedloom.models.predictors import Ensemble

SEED = 7  # of the federations
SIZES = (4, 9, 6)


def kl(q: MeanField, w: MeanField) -> Tensor:
    """Return KL(q ‖ w) in nats (eq. 8), ``[..., d] -> [...]``."""
    ratio = (q.sigma / w.sigma).square()
    distance = ((q.mu - w.mu) / w.sigma).square()
    return 0.5 * (ratio + distance - 1 - ratio.log()).sum(-1)


def made(**changes: Any) -> PFedBayesSettings:
    base = {"steps": 3, "batch_size": 3, "optimizer": "adam", "lr_personal": 0.02, "lr_global": 0.01, "zeta": 2.0}
    return PFedBayesSettings.model_validate(base | {"draws": 4, "personalize_steps": 3} | changes)


def some(d: int = 6, seed: int = 0, rows: tuple[int, ...] = ()) -> Tensor:
    """Return v ``[*rows, 2, d]`` with deviations between about 0.1 and 2."""
    random = torch.Generator().manual_seed(seed)
    v = torch.randn(*rows, 2, d, generator=random, dtype=torch.float64)
    v[..., 1, :] -= 0.5
    return v


def keyed(purpose: str, round: int = 1) -> Any:
    return lambda id, name: generator(SEED, f"{purpose}/{name}", id, round)


def predictors(half: PFedBayesClient, members: ClientGroup, opening: Prior) -> Any:
    """Return the result of a conversation without a final answer."""
    with pytest.raises(StopIteration) as end:
        next(half.open(members, opening))
    return end.value.value


def divergence(q: Tensor, w: Tensor) -> Tensor:
    """Return the KL divergence by torch.distributions, differentiable in both v."""
    normals = [Normal(v[0], F.softplus(v[1])) for v in (q, w)]
    return kl_divergence(*normals).sum()


# --- Gaussians --------------------------------------------------------------------------------------------------------


def test_kl_and_its_gradients() -> None:
    q, w = some(seed=1).requires_grad_(), some(seed=2).requires_grad_()
    expected = divergence(q, w)
    d_q, d_w = torch.autograd.grad(expected, [q, w])
    fields = MeanField(q.detach()), MeanField(w.detach())
    close(kl(*fields), expected.detach())
    d_mu, d_sigma = torch.zeros(6).double(), torch.zeros(6).double()
    add_posterior_gradient(d_mu, d_sigma, *fields, 1.0)
    close(torch.stack([d_mu, d_sigma * fields[0].slope]), d_q)
    close(torch.stack(prior_gradient(*fields)), d_w)


def test_softplus_and_its_inverse() -> None:
    rho = torch.linspace(-30, 30, 41, dtype=torch.float64)
    field = MeanField(torch.stack([torch.zeros_like(rho), rho]))
    torch.testing.assert_close(field.sigma, F.softplus(rho, threshold=1e3), rtol=1e-14, atol=0)
    torch.testing.assert_close(field.slope, torch.sigmoid(rho), rtol=1e-14, atol=0)
    torch.testing.assert_close(inverse_softplus(field.sigma), rho, rtol=1e-9, atol=1e-9)
    assert softplus(-2.5) == pytest.approx(float(F.softplus(torch.tensor(-2.5).double())), rel=1e-14)


def test_matched_moments_minimize_the_sum_of_divergences() -> None:
    """Lemma A.2: the gradient vanishes there, and no nearby distribution is better."""
    q = some(rows=(4,), seed=3)
    fields = MeanField(q)
    mu = fields.mu.mean(0)
    matched = matched_moments(mu, (fields.sigma**2 + (fields.mu - mu) ** 2).mean(0))

    def objective(w: Tensor) -> Tensor:
        """Return ``[m]`` from ``[m, 2, 6]``, the mean over the q_i."""
        here, there = Normal(q[:, 0], F.softplus(q[:, 1])), Normal(w[:, None, 0], F.softplus(w[:, None, 1]))
        return kl_divergence(here, there).sum(-1).mean(-1)

    w = matched[None].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(w).sum(), [w])
    close(gradient, torch.zeros_like(gradient))
    random = torch.Generator().manual_seed(4)
    steps = torch.randn(500, 2, 6, generator=random, dtype=torch.float64) * torch.logspace(-3, 1, 500)[:, None, None]
    assert (objective(matched + steps) > objective(matched[None])).all()


class Linear(FlatModel):
    """Model whose own loss, in place of the cross-entropy, is a parabola in θ."""

    layout = Layout((("weight", (3, 2)),))

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        assert y is not None
        return 0.5 * (self.forward(parameters, x) - torch.eye(3).double()[y]).square().sum(1)

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return x

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return x @ parameters["weight"].T


def test_the_reparameterized_gradient_is_unbiased() -> None:
    """For f(θ) = n/2 |xθ - t|² the expectation over q is known: ∂/∂μ = ∇f(μ), ∂/∂σ = n σ |x|²."""
    x, y = torch.tensor([[0.5, -2.0]]).double(), torch.tensor([1])
    nothing = Split(x[:0], y[:0])
    v, lr, samples, g = some(seed=5), 1e-4, 100, 200
    alike = [ClientData(f"c{i}", Split(x, y), nothing, nothing, 3) for i in range(g)]
    s = made(samples=samples, optimizer="gd", zeta=0.0, lr_personal=lr, lr_global=1e-6)
    q, w = MeanField(v.expand(g, 2, 6)), MeanField(v.expand(g, 2, 6))
    PFedBayesClient(s, setup(Linear())).visit(ClientGroup(alike, keyed("train")), range(g), q, w, 1, "train")
    before = MeanField(v)
    found = (before.v - q.v) / lr
    spread = found.std(0) / math.sqrt(g)  # standard error of the mean over all samples
    residual = x[0] @ before.mu.view(3, 2).T - F.one_hot(y[0], 3)
    d_mu = (residual[:, None] * x[0]).flatten()
    d_sigma = before.sigma * x[0].square().repeat(3)
    expected = torch.stack([d_mu, d_sigma * before.slope])
    assert ((found.mean(0) - expected).abs() < 4 * spread).all()
    assert (spread < 0.1 * expected.abs().mean()).all()


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


class Reference:
    """torch.optim on (27) and (28), with autograd and torch.distributions alone."""

    def __init__(self, s: PFedBayesSettings, v: Tensor, lr: float) -> None:
        self.v = v.clone().requires_grad_()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam([self.v], lr=lr) if s.optimizer == "adam" else torch.optim.SGD([self.v], lr=lr)
        )

    def step(self, objective: Tensor) -> None:
        (self.v.grad,) = torch.autograd.grad(objective, [self.v])
        self.optimizer.step()


def visit(
    s: PFedBayesSettings,
    problem: Setup,
    start: Tensor,
    v: Tensor,
    c: ClientData,
    round: int,
    kept: dict[str, tuple[dict[str, Any], ...]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run ClientUpdate(i, v) of Algorithm 1, line by line; ``kept`` has the two optimizers' state for a client."""
    n = len(c.train)
    q, w = Reference(s, start, s.lr_personal), Reference(s, v, s.lr_global)
    if kept is not None and c.id in kept:
        for of, memory in zip((q, w), kept[c.id], strict=True):
            of.optimizer.load_state_dict(memory)
    draws = generator(SEED, "train/train-noise", c.id, round)
    for index in batches(n, s.batch_size, s.steps, generator(SEED, "train/train", c.id, round)):
        likelihood = torch.zeros(()).double()
        for _ in range(s.samples):
            g = torch.empty_like(v[0]).normal_(generator=draws)
            theta = q.v[0] + F.softplus(q.v[1]) * s.noise * g
            logits = problem.model.logits(theta, c.train.x[index])
            likelihood = likelihood + surprise(logits, c.train.y[index])
        omega = n / len(index) / s.samples * likelihood + s.zeta * divergence(q.v, w.v.detach())
        q.step(omega / n if s.objective == "mean" and s.optimizer == "gd" else omega)
        w.step(divergence(q.v.detach(), w.v))
    if kept is not None:
        kept[c.id] = tuple(copy.deepcopy(of.optimizer.state_dict()) for of in (q, w))
    return q.v.detach(), w.v.detach()


GD = {"optimizer": "gd", "lr_personal": 1e-3, "lr_global": 2e-3, "zeta": 1.5}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"samples": 3},
        {"moments": "kept"},
        {"moments": "kept", "reset": True},
        GD,
        GD | {"objective": "mean", "samples": 2},
        GD | {"noise": 0.25},
        GD | {"reset": True},
    ],
)
@pytest.mark.parametrize("beta", [1.0, 0.6])
@pytest.mark.usefixtures("each_task")
def test_rounds_follow_algorithm_1(tmp_path: Path, options: dict[str, Any], beta: float) -> None:
    s, problem, data = made(beta=beta, **options), setup(), clients(SIZES)
    run = federation(tmp_path, PFEDBAYES, s, problem, data, rounds=2)
    v = run.state["v"]
    assert torch.equal(v[1], torch.full_like(v[1], -2.5))
    kept = {c.id: v for c in data}
    memory: dict[str, tuple[dict[str, Any], ...]] | None = {} if s.moments == "kept" else None
    for t in (1, 2):
        uploads = []
        for c in data:
            kept[c.id], localized = visit(s, problem, v if s.reset else kept[c.id], v, c, t, memory)
            uploads.append(localized)
        v = (1 - beta) * v + beta * torch.stack(uploads).mean(0)
    run.run()
    close(run.state["v"], v, atol=1e-10)
    for c in data:
        tensors = run.predictors[2, c.id]["personal"].tensors()
        close(torch.stack([tensors["mu"], tensors["rho"]]), kept[c.id], atol=1e-10)
    assert run.loop.journal.counted()[0].statistics["client_steps"] == 9


def test_kept_moments_do_not_affect_a_first_visit(tmp_path: Path) -> None:
    problem, data = setup(), clients(SIZES)
    fresh, kept = (
        federation(tmp_path / how, PFEDBAYES, made(moments=how), problem, data, rounds=2) for how in ("fresh", "kept")
    )
    first = [made(moments=how) for how in ("fresh", "kept")]
    for c in data:
        answers = []
        for s in first:
            group = ClientGroup([c], keyed("train"))
            answers.append((next(PFedBayesClient(s, problem).open(group, GlobalGaussian(fresh.state["v"]))), group))
        assert torch.equal(answers[0][0].v, answers[1][0].v)  # type: ignore[attr-defined]
        assert torch.equal(answers[0][1].kept[0]["v"], answers[1][1].kept[0]["v"])
    fresh.run(), kept.run()
    assert not torch.equal(fresh.state["v"], kept.state["v"])


@pytest.mark.parametrize("aggregation", ["parameters", "moments"])
def test_all_clients_train_and_some_are_averaged(tmp_path: Path, aggregation: str) -> None:
    """Algorithm 1 with S < N: every client's q continues, and the average is over the S drawn."""
    problem, data = setup(), clients(SIZES)
    s = made(averaged=2, aggregation=aggregation)
    run = federation(tmp_path / "2", PFEDBAYES, s, problem, data)
    v = run.state["v"]
    visits = {c.id: visit(s, problem, v, v, c, 1) for c in data}
    run.run()

    def averaged(chosen: Sequence[int]) -> Tensor:
        w = torch.stack([visits[data[i].id][1] for i in chosen])
        if aggregation == "parameters":
            return w.mean(0)
        mu, sigma = w[:, 0], F.softplus(w[:, 1])
        return matched_moments(mu.mean(0), (sigma**2 + mu**2).mean(0) - mu.mean(0) ** 2)

    pairs = [averaged(pair) for pair in ((0, 1), (0, 2), (1, 2))]
    assert sum(torch.allclose(run.state["v"], pair, rtol=0, atol=1e-9) for pair in pairs) == 1
    for c in data:
        tensors = run.predictors[1, c.id]["personal"].tensors()
        close(torch.stack([tensors["mu"], tensors["rho"]]), visits[c.id][0], atol=1e-10)
    everyone, all_three = (
        federation(tmp_path / name, PFEDBAYES, made(averaged=size, aggregation=aggregation), problem, data, rounds=2)
        for name, size in (("all", None), ("3", 3))
    )
    everyone.run(), all_three.run()
    assert torch.equal(everyone.state["v"], all_three.state["v"])


@dataclass
class RoundOf:
    """A round with random numbers and without clients."""

    number: int

    def generator(self, purpose: str) -> torch.Generator:
        return generator(SEED, purpose, round=self.number)


def test_averaged_clients_are_redrawn_among_the_replies() -> None:
    server = PFedBayesServer(made(averaged=2), setup(), generator(SEED, "init"))
    present = torch.tensor([True, True, False, True, True])
    answered: Replies[Any] = Replies(None, present, torch.full((5,), 9))
    drawn = []
    for t in range(1, 30):
        weights = server._drawn(answered, cast(Round, RoundOf(t)))
        assert sorted(weights.tolist()) == [0, 0, 0, 0.5, 0.5]
        drawn.append(tuple(weights.nonzero()[:, 0].tolist()))
    assert set(drawn) == {(0, 1), (0, 3), (0, 4), (1, 3), (1, 4), (3, 4)}


def test_a_client_state_of_an_older_version_has_no_moments() -> None:
    """The settings of an open federation may change on resume."""
    s, problem, c = made(moments="kept"), setup(), client("c0", 5)
    v = some(problem.model.layout.size, seed=4) * 0.1
    groups = [ClientGroup([c], keyed("train"), [state]) for state in ({"v": v}, None)]
    for group in groups:
        next(PFedBayesClient(s, problem).open(group, GlobalGaussian(v)))
    assert all(torch.equal(groups[0].kept[0][name], row) for name, row in groups[1].kept[0].items())


def test_gradient_descent_has_no_moments_to_keep() -> None:
    with pytest.raises(ValidationError, match=r"moments: kept .*optimizer: adam"):
        made(moments="kept", optimizer="gd")


@pytest.mark.usefixtures("each_task")
def test_an_unseen_client_adapts_the_global_distribution(tmp_path: Path) -> None:
    """Compare with steps on (27) with a fixed prior."""
    s, problem, data = made(), setup(), clients(SIZES)
    run = federation(tmp_path, PFEDBAYES, s, problem, data, unseen=["c2"])
    run.run()
    v, c = run.state["v"], data[2]
    q = Reference(s, v, s.lr_personal)
    noise = generator(SEED, "evaluate/personalize-noise", c.id, 1)
    for index in batches(6, 3, s.personalize_steps, generator(SEED, "evaluate/personalize", c.id, 1)):
        theta = q.v[0] + F.softplus(q.v[1]) * torch.empty_like(v[0]).normal_(generator=noise)
        loss = surprise(problem.model.logits(theta, c.train.x[index]), c.train.y[index])
        q.step(6 / len(index) * loss + s.zeta * divergence(q.v, v))
    named = run.predictors[1, "c2"]
    close(torch.stack(list(named["personal"].tensors().values())), q.v.detach(), atol=1e-10)
    assert torch.equal(torch.stack(list(named["global"].tensors().values())), v)
    half = PFedBayesClient(s, problem)
    assert (half.personalization_steps("personal", 9), half.personalization_steps("global", 9)) == (3, 0)


def test_without_noise_every_drawn_network_is_the_mean_network() -> None:
    v = some(setup().model.layout.size, seed=3).float().double()  # as sent over the wire
    group = ClientGroup([client("c0", 5)], keyed("evaluate"), may_keep=False)

    def drawn(noise: float) -> Tensor:
        half = PFedBayesClient(made(noise=noise, personalize_steps=0), setup())
        (named,) = predictors(half, group, Prior(v))
        predictor = named["personal"]
        assert isinstance(predictor, Ensemble)
        return torch.stack([torch.cat([leaf.flatten() for leaf in network.values()]) for network in predictor.networks])

    mean = torch.cat([leaf.flatten() for leaf in setup().model.layout.leaves(v[0]).values()])
    assert bool((drawn(0.0) == mean).all())
    assert torch.allclose(drawn(0.5) - mean, 0.5 * (drawn(1.0) - mean), rtol=1e-12, atol=1e-12)


# --- prediction -------------------------------------------------------------------------------------------------------


def test_prediction_is_the_mean_over_the_draws() -> None:
    model, v = setup().model, some(setup().model.layout.size, seed=8)
    noise = torch.randn(5, v.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = client("c0", 7).train.x
    each = torch.stack([model.logits(v[0] + F.softplus(v[1]) * g, x).softmax(1) for g in noise])
    predictor = Ensemble(model, MeanField(v).sample(noise), mu=v[0], rho=v[1])
    close(predictor.probabilities(x), each.mean(0))
    close(predictor.draws_log_probabilities(x).exp(), each)
    close(predictor.probabilities(x).sum(1), torch.ones(7).double())
    half = PFedBayesClient(made(draws=0), setup())
    (named,) = predictors(half, ClientGroup([client("c0", 5)], keyed("evaluate"), may_keep=False), Prior(v))
    close(named["global"].probabilities(x), model.logits(v[0], x).softmax(1))


def test_an_evaluation_measures_disagreement_of_the_draws(tmp_path: Path) -> None:
    evaluation = federation(tmp_path / "a", PFEDBAYES, made(rho=0.0), setup(), clients(SIZES), rounds=0).run()
    assert (evaluation.uncertainty[..., 2] > 0.01).all()
    alone = federation(tmp_path / "b", PFEDBAYES, made(rho=0.0, draws=0), setup(), clients(SIZES), rounds=0).run()
    assert (alone.uncertainty[..., 2] == 0).all()
    assert (alone.uncertainty[..., 0] == 2).all()  # number of test examples


# --- errors -----------------------------------------------------------------------------------------------------------


def test_gradient_descent_beyond_its_bound_is_rejected() -> None:
    """The bound is ζ η₁ < 2 softplus(ρ)²: the paper's settings are inside, by a fifth."""
    paper = PFedBayesSettings()
    assert paper.zeta * paper.lr_personal == pytest.approx(0.8 * 2 * softplus(-2.5) ** 2, rel=0.01)
    with pytest.raises(ValidationError, match=r"lr_personal: 0\.013\b.*0\.0124"):
        PFedBayesSettings(zeta=13.0)
    with pytest.raises(ValidationError, match=r"lr_global: 0\.02"):
        PFedBayesSettings(lr_global=0.02)
    PFedBayesSettings(zeta=13.0, objective="mean")
    PFedBayesSettings(zeta=13.0, optimizer="adam")


@pytest.mark.parametrize(("zeta", "refused"), [(12.3, False), (12.6, True)])
def test_the_bound_is_where_divergence_starts(zeta: float, refused: bool) -> None:
    """On KL alone with a fixed prior: |1 - ζη/σ²| below 1 contracts, above 1 diverges."""
    s = made(optimizer="gd", lr_personal=0.001, zeta=zeta, lr_global=1e-3) if not refused else None
    v = gaussian(torch.zeros(6).double(), -2.5)
    q, w = MeanField(v + 0.01 * torch.tensor([[1.0], [0.0]]).double()), MeanField(v)
    for _ in range(400):
        d_mu, d_sigma = torch.zeros(6).double(), torch.zeros(6).double()
        add_posterior_gradient(d_mu, d_sigma, q, w, zeta)
        q.mu -= 0.001 * d_mu
    assert (bool(q.mu.abs().max() > 0.01)) is refused
    assert (s is None) is refused
    if refused:
        with pytest.raises(ValidationError, match=r"lr_personal: 0\.0126"):
            made(optimizer="gd", lr_personal=0.001, zeta=zeta, lr_global=1e-3)


def test_a_prior_that_became_too_narrow_is_rejected() -> None:
    s = PFedBayesSettings(batch_size=3)
    v = gaussian(torch.zeros(setup().model.layout.size).double(), -3.0)
    with pytest.raises(ExperimentError, match=r"lr_personal: 0\.01\b.*0\.00472"):
        next(PFedBayesClient(s, setup()).open(ClientGroup([client("c0", 5)], keyed("train")), GlobalGaussian(v)))


def test_divergence_is_reported_with_its_step() -> None:
    s = made(optimizer="gd", lr_personal=1e-3, zeta=1.0, lr_global=1e-3, steps=60)
    data = client("c0", 5)
    data = dataclasses.replace(data, train=Split(data.train.x * 1e4, data.train.y))
    v = gaussian(setup().model.init(generator(0, "init"), torch.float64), -2.5)
    members = ClientGroup([data, client("c1", 5)], keyed("train"))
    next(PFedBayesClient(s, setup()).open(members, GlobalGaussian(v)))
    assert list(members.lost) == [0]  # the other client of its batch continues
    assert re.search(r"step \d+ of 60\b.*lr_personal .*\b0\.001\b.*objective: mean.*optimizer: adam", members.lost[0])
    alone = ClientGroup([data], keyed("train"))
    next(PFedBayesClient(s, setup()).open(alone, GlobalGaussian(v)))
    assert alone.lost == members.lost


# --- dead inputs ------------------------------------------------------------------------------------------------------


DEAD = (slice(None), slice(None), slice(None), slice(2, 5))  # columns of pixels that are 0 in every image
HIDDEN = 4


def dark(data: ClientData) -> ClientData:
    """Return the client in float32, its dead pixels set to 0."""

    def part(split: Split) -> Split:
        x = split.x.float()
        x[DEAD] = 0
        return Split(x, split.y)

    return replace(data, train=part(data.train), validation=part(data.validation), test=part(data.test))


def dead_weights(model: MLP) -> Tensor:
    """Return positions in θ of the weights from dead pixels to hidden units."""
    pixels = torch.zeros(1, *IMAGE, dtype=torch.bool)
    pixels[DEAD] = True
    weights = pixels.flatten().expand(HIDDEN, -1).flatten()
    return weights.nonzero()[:, 0]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (1, {}),
        (6, {}),
        (7, {}),
        (6, {"moments": "kept"}),
        (6, {"beta": 0.7}),
        (6, {"averaged": 3}),
        (6, {"aggregation": "moments"}),
        (7, {"aggregation": "moments", "beta": 0.7}),
        (3, {"reset": True, "zeta": 10.0}),
        (6, {"optimizer": "ivon", "lr_personal": 0.1, "betas": [0.9, 0.99]}),
    ],
)
def test_weights_of_a_dead_input_do_not_change(tmp_path: Path, n: int, options: dict[str, Any]) -> None:
    model = MLP(IMAGE, [HIDDEN], CLASSES)
    problem = Setup(model, CLASSES, IMAGE, n, torch.float32)
    s = PFedBayesSettings.model_validate(
        {"steps": 50, "batch_size": 4, "optimizer": "adam", "lr_personal": 0.003, "lr_global": 0.003, "zeta": 1.0}
        | {"personalize_steps": 50, "draws": 2}
        | options
    )
    data = [dark(c) for c in clients([5 + i for i in range(n)] + [6])]
    run = federation(tmp_path, PFEDBAYES, s, problem, data, rounds=3, unseen=[data[-1].id])
    start, dead = run.state["v"], dead_weights(model)
    run.run()
    found = {"v": run.state["v"]}
    for c in data:
        tensors = run.predictors[3, c.id]["personal"].tensors()
        found[c.id] = torch.stack([tensors["mu"], tensors["rho"]])
    for name, v in found.items():
        assert v.dtype == torch.float32
        assert torch.equal(v[:, dead], start[:, dead]), name
        alive = torch.ones(v.shape[1], dtype=torch.bool).scatter_(0, dead, False)
        assert (v[:, alive] != start[:, alive]).double().mean() > 0.9, name


def test_gradients_of_equal_distributions_are_exactly_0() -> None:
    """In float32 and float64, for deviations from 1e-6 to 20."""
    for dtype in (torch.float32, torch.float64):
        v = gaussian(torch.linspace(-1, 1, 997, dtype=dtype), 0.0)
        v[1] = torch.linspace(-14, 20, 997, dtype=dtype)
        q, w = MeanField(v), MeanField(v)
        gradients = torch.zeros_like(v[0]), torch.zeros_like(v[0])
        add_posterior_gradient(*gradients, q, w, 3.0)
        for gradient in (*gradients, *prior_gradient(q, w)):
            assert not gradient.any()
