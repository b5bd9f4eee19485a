"""pFedBayes: every client's model is a Gaussian over θ, the shared one is its prior.

X. Zhang, Y. Li, W. Li, K. Guo, Y. Shao, Personalized federated learning via variational Bayesian inference, ICML 2022,
arXiv 2206.07977 (papers/003): problem (4)-(5), Algorithm 1. A client keeps its q_i = N(μ, softplus(ρ)²) between rounds.
In a round it alternates R steps of q_i on its personal objective and of its own copy of the global distribution w on
KL(q_i ‖ w), and uploads that copy. What the paper leaves open, and measurements: docs/algorithms/pfedbayes.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.base import (
    Algorithm,
    ClientHalf,
    Cohort,
    Conversation,
    Group,
    Round,
    ServerHalf,
    Statistics,
    Task,
    conversation,
)
from fedloom.algorithms.client import Local, keep, kept
from fedloom.algorithms.optimizers import adam_
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.flat import FlatModel
from fedloom.models.predictors import Ensemble, Predictors
from fedloom.settings import Settings
from fedloom.theory.gaussian import (
    MU,
    RHO,
    MeanField,
    add_posterior_gradient,
    gaussian,
    matched_moments,
    prior_gradient,
    softplus,
)


class PFedBayesServer(ServerHalf):
    """v ← (1 - β) v + β · average of the localized global distributions."""

    def __init__(self, settings: PFedBayesSettings, task: Task, generator: torch.Generator) -> None:
        super().__init__(settings, task)
        self.state["v"] = gaussian(task.model.init(generator, task.dtype), settings.rho)

    def train_round(self, round: Round) -> Statistics:
        """One round of Algorithm 1."""
        v = self.state["v"]
        updated = round.sample().send(GlobalGaussian(v), LocalizedGaussian)
        average = self._matched(updated) if self.settings.aggregation == "moments" else updated.mean(updated.v)
        self.state["v"] = torch.lerp(v, average, self.settings.beta)
        return {"client_steps": updated.total(updated.steps), "loss": float(updated.mean(updated.loss))}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the global distribution; the client has its own, or makes one from it."""
        return cohort.send(Prior(self.state["v"]))

    def _matched(self, updated: Replies[LocalizedGaussian]) -> Tensor:
        """Lemma A.2 over the clients that answered."""
        clients = MeanField(updated.v)
        mu = updated.mean(clients.mu)
        return matched_moments(mu, updated.mean(clients.sigma.square() + (clients.mu - mu).square()))


class PFedBayesClient(ClientHalf):
    """ClientUpdate of Algorithm 1; q_i is the client's state between rounds."""

    predictors = ("personal", "global")
    stateful = True

    @conversation
    def train(self, clients: Group, opening: GlobalGaussian) -> Conversation:
        """ClientUpdate(i, v) of Algorithm 1."""
        s = self.settings
        prior = opening.v.expand(len(clients), -1, -1)
        q, w = MeanField(prior if s.reset else kept(clients, "v", prior)), MeanField(prior)
        loss = local_steps(self.task.model, q, w, clients, range(len(clients)), s, s.steps, "train")
        keep(clients, v=q.v)
        yield LocalizedGaussian(w.v, torch.full_like(loss, s.steps), loss)
        return None

    @conversation
    def personalize(self, clients: Group, opening: Prior) -> Predictors:
        """``personal`` is the q_i that the client kept, or one made from the prior; ``global`` is the prior."""
        s = self.settings
        v = kept(clients, "v", opening.v.expand(len(clients), -1, -1))
        new = [i for i in range(len(clients)) if clients.state(i) is None]
        if new and s.personalize_steps:
            q, w = MeanField(v[new]), MeanField(opening.v.expand(len(new), -1, -1))
            local_steps(self.task.model, q, w, clients, new, s, s.personalize_steps, "personalize", localize=False)
            v[new] = q.v
        predictors: Predictors = []
        for i in range(len(clients)):
            both = {"personal": v[i], "global": opening.v}
            predictors.append({name: self._predictor(of, clients.generator(i, name)) for name, of in both.items()})
        return predictors

    def _predictor(self, v: Tensor, generator: torch.Generator) -> Ensemble:
        """The mean prediction of S networks drawn from N(μ, σ²); for S = 0, of the mean network alone."""
        noise = torch.randn(self.settings.draws, v.shape[-1], generator=generator, dtype=v.dtype)
        thetas = MeanField(v).sample(noise.to(v.device)) if len(noise) else v[None, MU]
        return Ensemble(self.task.model, thetas, mu=v[MU], rho=v[RHO])

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """``personalize_steps`` for ``personal``."""
        return self.settings.personalize_steps if predictor == "personal" else 0


def local_steps(
    model: FlatModel,
    q: MeanField,
    w: MeanField,
    clients: Group,
    members: Sequence[int],
    s: PFedBayesSettings,
    steps: int,
    purpose: str,
    *,
    localize: bool = True,
) -> Tensor:
    """The loop of ClientUpdate (Algorithm 1) for g clients of a group; changes q and w in place.

    A step draws a batch and K samples of N(0, I), makes one step of q on Ω (eq. 27), then one of w on KL(q ‖ w)
    (eq. 28) with the q just updated.

    Parameters
    ----------
    q, w
        ``[g, d]``; w stays as it is if not ``localize``.
    members
        The positions of the g clients in the group.
    purpose
        Of the generator that draws the batches; that of the noise has ``-noise`` added.

    Returns
    -------
    Tensor
        ``[g, 1]`` float64: negative log-likelihood per example, mean over steps and samples.

    Raises
    ------
    ExperimentError
        If gradient descent is beyond its stability bound under this prior.
    """
    local = Local(model, clients, members=members)
    n = torch.tensor(local.sizes, dtype=q.mu.dtype, device=q.mu.device)[:, None]
    noises = [clients.generator(i, f"{purpose}-noise") for i in members]
    lr_q, lr_w = s.lr_personal / n if s.objective == "mean" else torch.full_like(n, s.lr_personal), s.lr_global
    check_stability(s, float(lr_q.max()), w)
    descend_q, descend_w = (
        (Adam(q, s.lr_personal), Adam(w, lr_w))
        if s.optimizer == "adam"
        else (GradientDescent(q, lr_q), GradientDescent(w, torch.full_like(n, lr_w)))
    )
    losses = []
    totals = [size / s.samples for size in local.sizes]  # n/K of eq. 27, over a batch's mean
    for batch in local.batches(s.batch_size, [steps] * len(members), purpose, totals):
        draws = [normals(q.mu, noises) for _ in range(s.samples)]
        sampled = [local.gradient_at(q.sample(noise), batch) for noise in draws]
        d_mu = reduce(torch.add, [d_theta for d_theta, _ in sampled])
        d_sigma = reduce(torch.add, [d_theta * noise for (d_theta, _), noise in zip(sampled, draws, strict=True)])
        losses.append(reduce(torch.add, [loss for _, loss in sampled]))
        add_posterior_gradient(d_mu, d_sigma, q, w, s.zeta)
        descend_q.step(d_mu, d_sigma.mul_(q.slope))
        if localize:
            descend_w.step(*prior_gradient(q, w))
    steep = s.optimizer == "gd" and s.objective == "total"
    also = "objective: mean, whose steps do not grow with n, or optimizer: adam" if steep else ""
    local.lose_diverged(q.mu + q.rho, losses, [steps] * len(members), "lr_personal", s.lr_personal, also)
    return torch.stack(losses).double().mean(0)[:, None] / n.double()


def normals(like: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Standard normals ``[g, d]``, each client's from its own generator, drawn on the CPU."""
    noise = torch.empty(like.shape, dtype=like.dtype)
    for row, generator in zip(noise, generators, strict=True):
        row.normal_(generator=generator)
    return noise.to(like.device)


class GradientDescent:
    """(μ, ρ) ← (μ, ρ) − lr · gradient, with ``lr`` ``[g, 1]``."""

    def __init__(self, of: MeanField, lr: Tensor) -> None:
        self.of = of
        self.lr = lr

    def step(self, d_mu: Tensor, d_rho: Tensor) -> None:
        """One step, in place."""
        self.of.mu.addcmul_(d_mu, self.lr, value=-1)
        self.of.rho.addcmul_(d_rho, self.lr, value=-1)
        self.of.refresh()


class Adam:
    """Adam on (μ, ρ); its moments are fresh."""

    def __init__(self, of: MeanField, lr: float) -> None:
        self.of = of
        self.lr = lr
        self.first, self.second = ([torch.zeros_like(of.mu), torch.zeros_like(of.mu)] for _ in range(2))
        self.steps = [torch.zeros((), device=of.mu.device) for _ in range(2)]

    def step(self, d_mu: Tensor, d_rho: Tensor) -> None:
        """One step, in place."""
        adam_([self.of.mu, self.of.rho], [d_mu, d_rho], self.first, self.second, self.steps, self.lr)
        self.of.refresh()


# --- settings ---------------------------------------------------------------------------------------------------------


class PFedBayesSettings(Settings):
    """Keys of ``algorithm`` for pFedBayes."""

    steps: int = Field(default=20, ge=1, description="R, local steps of a round: each one of q_i and one of w")
    batch_size: int = Field(default=50, ge=1, description="b; a client with fewer examples uses them all")
    samples: int = Field(default=1, ge=1, description="K, Monte Carlo samples of θ in a step (eq. 27)")
    zeta: float = Field(default=10.0, ge=0, description="ζ, weight of KL(q_i ‖ w) (eq. 5)")
    rho: float = Field(default=-2.5, description="ρ of every parameter at the start: σ = softplus(ρ)")
    optimizer: Literal["gd", "adam"] = Field(
        default="gd", description="gradient descent, or Adam with moments that are fresh at every visit"
    )
    lr_personal: float = Field(default=0.001, gt=0, description="η₁, learning rate of q_i")
    lr_global: float = Field(default=0.001, gt=0, description="η₂, learning rate of w on the client")
    objective: Literal["total", "mean"] = Field(
        default="total",
        description="total: eq. 27, a sum over the client's n examples; mean: the same divided by n, so that a step of "
        "gradient descent does not grow with n (a step of Adam never does)",
    )
    beta: float = Field(default=1.0, gt=0, description="β, step of the server to the clients' average")
    aggregation: Literal["parameters", "moments"] = Field(
        default="parameters", description="average (μ, ρ) (Algorithm 1), or match the moments (Lemma A.2)"
    )
    reset: bool = Field(default=False, description="start q_i at the global distribution at every visit")
    draws: int = Field(
        default=10,
        ge=0,
        description="S, networks whose predicted probabilities are averaged; 0: the mean network alone",
    )
    personalize_steps: int = Field(
        default=20, ge=0, description="steps from the global distribution that a client without a q_i makes for one"
    )

    @model_validator(mode="after")
    def _stable(self) -> Self:
        if self.optimizer == "gd":
            bound = 2 * softplus(self.rho) ** 2
            if self.objective == "total" and self.zeta * self.lr_personal >= bound:
                raise ValueError(_unstable("zeta · lr_personal", self.zeta * self.lr_personal, bound))
            if self.lr_global >= bound:
                raise ValueError(_unstable("lr_global", self.lr_global, bound))
        return self


def _unstable(what: str, found: float, bound: float) -> str:
    return (
        f"{what}: found {found:.3g}, allowed with optimizer gd: below 2σ_w² = {bound:.3g} "
        f"(σ_w = {math.sqrt(bound / 2):.3g}), from where on gradient descent on KL(q_i ‖ w) diverges; "
        "with optimizer adam there is no such bound"
    )


def check_stability(s: PFedBayesSettings, lr_q: float, prior: MeanField) -> None:
    """Refuse gradient descent whose step on ζ·KL, a parabola of curvature ζ/σ_w² in μ, would diverge."""
    if s.optimizer == "gd":
        bound = 2 * float(prior.sigma.min()) ** 2
        for what, found in (("ζ·η₁", s.zeta * lr_q), ("η₂", s.lr_global)):
            if found >= bound:
                raise ExperimentError(_unstable(what, found, bound))


# --- what travels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GlobalGaussian(Message):
    """Opens training: the global distribution v."""

    v: Tensor = broadcast(Quantity.GAUSSIAN)  # [2, d]


@dataclass(frozen=True, eq=False)
class LocalizedGaussian(Message):
    """The global distribution after R local steps, v_{w,R}."""

    v: Tensor = rows(Quantity.GAUSSIAN, 2, "d")  # [c, 2, d]
    steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64, mean over steps and samples of the batch's mean NLL


@dataclass(frozen=True, eq=False)
class Prior(Message):
    """Opens personalization: the global distribution v."""

    v: Tensor = broadcast(Quantity.GAUSSIAN)  # [2, d]


PFEDBAYES = Algorithm(
    name="pfedbayes",
    version=1,
    settings=PFedBayesSettings,
    server=PFedBayesServer,
    client=PFedBayesClient,
    messages=(GlobalGaussian, LocalizedGaussian, Prior),
    titles=lambda settings: {"personal": "pFedBayes", "global": "pFedBayes, global model"},
)
