"""pFedBayes: every client's model is a Gaussian over θ whose prior is shared.

X. Zhang, Y. Li, W. Li, K. Guo, Y. Shao, Personalized federated learning via variational Bayesian inference, ICML 2022,
arXiv 2206.07977 (papers/003): problem (4)-(5), Algorithm 1. A client keeps its q_i = N(μ, softplus(ρ)²) between rounds.
In a round it alternates R steps of q_i on its personal objective and of its copy of the global distribution w on
KL(q_i ‖ w), and uploads that copy. The likelihood is that of the model's task. Details left open by the paper, and
measurements: docs/algorithms/pfedbayes.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal, Self, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Conversation, Round, Setup, conversation
from fedloom.algorithms.batches import NothingToTrainOn
from fedloom.algorithms.client import LocalTrainer
from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.local_sgd import Betas
from fedloom.algorithms.mean_field import (
    BETAS,
    MU,
    RHO,
    MeanField,
    add_posterior_gradient,
    by_ivon,
    gaussian,
    matched_moments,
    prior_gradient,
    softplus,
)
from fedloom.algorithms.optimizers import adam_
from fedloom.algorithms.progress import LoopState
from fedloom.algorithms.sums import Summed, SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.flat import FlatModel
from fedloom.models.predictors import Ensemble, Predictors
from fedloom.privacy.examples import NoisySteps


class PFedBayesServer(base.ServerAlgorithm):
    """Server that sets v ← (1 - β) v + β · average of the localized global distributions."""

    def __init__(self, settings: PFedBayesSettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        self.state["v"] = gaussian(setup.model.init(generator, setup.dtype), settings.rho)

    def update_bounds(self, examples: int) -> Mapping[str, float]:
        """Return the bound of the number of steps, the same for all clients."""
        return {"steps": self.settings.steps}

    def train_round(self, round: Round) -> base.Statistics:
        """Perform one round of Algorithm 1."""
        v = self.state["v"]
        updates = round.sample().send(GlobalGaussian(v), LocalizedGaussian)
        self.state["v"] = torch.lerp(v, self._average(v, updates, self._drawn(updates, round)), self.settings.beta)
        return {"client_steps": updates.total(updates.steps), "loss": float(updates.mean(updates.loss))}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the global distribution; a client has its own, or derives one from it."""
        return cohort.send(Prior(self.state["v"]))

    def _drawn(self, updates: Replies[LocalizedGaussian], round: Round) -> Tensor:
        """Return weights ``[c]``: 1/S for each of the S clients drawn from those that answered, 0 for the others."""
        rows, most = updates.present.nonzero()[:, 0], self.settings.averaged
        if most is None or most >= len(rows):
            return updates.mean_weights
        order = torch.randperm(len(rows), generator=round.generator("averaged"))
        weights = torch.zeros_like(updates.mean_weights)
        weights[rows[order[:most]]] = 1 / most
        return weights

    def _average(self, v: Tensor, updates: Replies[LocalizedGaussian], weights: Tensor) -> Tensor:
        """Average the localized distributions ``[2, d]``; entries that no client moved stay bitwise unchanged.

        A weighted sum of equal numbers is inexact, and Adam would amplify its rounding error to steps of its learning
        rate at the next visit.
        """
        average = v + updates.mean(updates.v, weights, since=v)
        if self.settings.aggregation == "parameters":
            return average
        clients, mu, change = MeanField(updates.v), average[MU], updates.v - v  # Lemma A.2
        second = updates.mean(clients.sigma.square() + (clients.mu - mu).square(), weights)
        still = updates.mean((change != 0).to(v.dtype), weights).sum(0) == 0
        return torch.where(still, v, matched_moments(mu, second))


class PFedBayesClient(base.ClientAlgorithm):
    """Client of pFedBayes, which runs ClientUpdate of Algorithm 1; q_i is its state between rounds."""

    predictors = ("personal", "global")
    stateful = True

    @conversation
    def train(self, clients: ClientGroup, opening: GlobalGaussian) -> Conversation:
        """Run ClientUpdate(i, v) of Algorithm 1."""
        s = self.settings
        prior = opening.v.expand(len(clients), -1, -1)
        q, w = MeanField(prior if s.reset else clients.load_state("v", prior)), MeanField(prior)
        adam = AdamMoments.none(prior)
        if s.moments == "kept":
            adam = AdamMoments(clients.load_state("moments", adam.of), clients.load_state("steps", adam.steps))
        loss = self.visit(clients, range(len(clients)), q, w, s.steps, "train", adam)
        clients.save_state(v=q.v, **({"moments": adam.of, "steps": adam.steps} if s.moments == "kept" else {}))
        yield LocalizedGaussian(w.v, torch.full_like(loss, s.steps), loss)
        return None

    @conversation
    def personalize(self, clients: ClientGroup, opening: Prior) -> Predictors:
        """Return ``personal``, the client's kept q_i or one derived from the prior, and ``global``, the prior."""
        s, prior = self.settings, opening.v.expand(len(clients), -1, -1)
        v, new = clients.load_state("v", prior), clients.new
        parameters = {"personal": v, "global": prior}
        if new and s.personalize_steps:
            q, w = MeanField(v[new]), MeanField(prior[new])
            try:
                self.visit(clients, new, q, w, s.personalize_steps, "personalize")
            except NothingToTrainOn:
                if len(clients) > 1:  # served one by one
                    raise
                del parameters["personal"]
            v[new] = q.v
        return [
            {name: self._predictor(values[i], clients.generator(i, name)) for name, values in parameters.items()}
            for i in range(len(clients))
        ]

    def visit(
        self,
        clients: ClientGroup,
        members: Sequence[int],
        q: MeanField,
        w: MeanField,
        steps: int,
        purpose: str,
        moments: AdamMoments | None = None,
    ) -> Tensor:
        """Run the loop of ClientUpdate (Algorithm 1) for g members of a group.

        Changes q and w ``[g, d]`` in place, and Adam's moments, which are fresh by default. A step draws a batch and K
        samples of N(0, I), times ``noise``, makes one step of q on Ω (eq. 27), then one of w on KL(q ‖ w) (eq. 28) with
        the updated q; w changes only if the purpose is ``train``.

        Raise ExperimentError if gradient descent exceeds its stability bound under this prior.

        Returns
        -------
        Tensor
            ``[g, 1]`` float64: negative log-likelihood per example, mean over steps and samples.
        """
        s, local = self.settings, LocalTrainer(likelihood_of(self.setup.model), clients, members=members)
        noises = [clients.generator(i, f"{purpose}-noise") for i in members]
        moments = AdamMoments.none(q.v) if moments is None else moments
        memory: list[Tensor] = [moments.of]
        descend_q, descend_w = self._steps(local, q, w, moments, memory)
        losses: list[Tensor] = []
        totals = [size / s.samples for size in local.sizes]  # n/K of eq. 27, over a batch's mean
        counts = [steps] * len(members)

        def draw(skip: int) -> Iterator[Batch]:
            return local.batches(s.batch_size, counts, purpose, totals, skip=skip)

        changed = [*q.tensors(), *w.tensors(), *memory]
        state = LoopState(tensors=changed, histories=[losses], generators=noises)
        for batch in local.continued(draw, state, counts):
            draws = [normals(q.mu, noises).mul_(s.noise) for _ in range(s.samples)]
            d_mu, d_sigma, loss, theta = sampled_derivatives(local, batch, q, draws)
            losses.append(loss)
            descend_q(d_mu, d_sigma)  # eq. 27
            if purpose == "train":
                descend_w(*prior_gradient(q, w))  # eq. 28
            self._track(local, batch, theta, (q, w) if purpose == "train" else (q,))
        moments.steps.add_(steps)
        steep = s.objective == "total" and s.optimizer == "gd"
        also = "objective: mean, whose steps do not grow with n, or optimizer: adam" if steep else ""
        trained = local.trained(q.mu + q.rho, losses, counts, "lr_personal", s.lr_personal, also)
        return trained.loss / torch.tensor(local.sizes)[:, None]

    def _steps(
        self, local: LocalTrainer, q: MeanField, w: MeanField, moments: AdamMoments, memory: list[Tensor]
    ) -> tuple[Step, Step]:
        """Return the steps of q, along derivatives of the likelihood in (μ, σ), and of w, in (μ, ρ).

        Both add to ``memory`` what they change beside q, w and the moments.

        Raises ExperimentError for gradient descent beyond its stability bound.
        """
        s = self.settings
        n = torch.tensor(local.sizes, dtype=q.mu.dtype, device=q.mu.device)[:, None]
        lr_q = s.lr_personal / n if s.objective == "mean" else torch.full_like(n, s.lr_personal)
        if reason := unstable(s, float(lr_q.max()), float(w.sigma.min())):
            raise ExperimentError(reason)
        if s.optimizer == "gd":
            return on_objective(by_gradient(q, lr_q), q, w, s.zeta), by_gradient(w, torch.full_like(n, s.lr_global))
        descend_w = by_adam(w, s.lr_global, moments, 1, memory)
        if s.optimizer == "ivon":
            return by_ivon(q, w, s.lr_personal, s.zeta, s.betas or BETAS, memory), descend_w
        return on_objective(by_adam(q, s.lr_personal, moments, 0, memory), q, w, s.zeta), descend_w

    def _track(self, local: LocalTrainer, batch: Batch, theta: Tensor, fields: Sequence[MeanField]) -> None:
        """Move the buffers in the means of these Gaussians by a call of the drawn network θ ``[g, d]``."""
        layout = self.setup.model.layout
        if layout.buffers:
            is_buffer = layout.mask(layout.buffers).to(theta.device)
            for field in fields:
                w = local.parameters(torch.where(is_buffer, field.mu, theta))
                with torch.no_grad():
                    local.value(w, batch)
                field.mu.copy_(torch.where(is_buffer, local.join(w), field.mu))

    def _predictor(self, v: Tensor, generator: torch.Generator) -> Ensemble:
        """Return the mean prediction of S networks drawn from N(μ, σ²), or for S = 0 that of the mean network."""
        noise = self.settings.noise * torch.randn(self.settings.draws, v.shape[-1], generator=generator, dtype=v.dtype)
        thetas = MeanField(v).sample(noise.to(v.device)) if len(noise) else v[None, MU]
        return Ensemble(self.setup.model, thetas, mu=v[MU], rho=v[RHO])


def likelihood_of(model: FlatModel) -> FlatModel:
    """Return the model with -log p(y | x) of its task as its loss; a loss that the model defines is taken as this.

    Examples are independent, so that each counts alike.
    """
    view = copy.copy(model)
    view.batch_weights = lambda y, weight: weight  # type: ignore[method-assign]
    if not model.own_loss:
        view.loss = partial(_negative_log_likelihood, model)  # type: ignore[method-assign]
    view.in_training = lambda: likelihood_of(model.in_training())  # type: ignore[method-assign]
    return view


def _negative_log_likelihood(model: FlatModel, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
    assert y is not None
    return model.task.negative_log_likelihood(model.forward(parameters, x), y)


Step: TypeAlias = Callable[[Tensor, Tensor], None]
"""Step in place along ``(∂/∂μ, ∂/∂ρ)``, or ``(∂/∂μ, ∂/∂σ)``."""


def normals(like: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw standard normals ``[g, d]`` on the CPU, each client's from its own generator."""
    noise = torch.empty(like.shape, dtype=like.dtype)
    for row, generator in zip(noise, generators, strict=True):
        row.normal_(generator=generator)
    return noise.to(like.device)


def sampled_derivatives(
    local: LocalTrainer, batch: Batch, q: MeanField, draws: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ∂/∂μ and ∂/∂σ ``[g, d]`` of a batch's loss and the loss ``[g]``, summed over samples, and the last θ."""
    thetas = [q.sample(noise) for noise in draws]  # eq. 26
    sampled = [local.gradient_at(theta, batch) for theta in thetas]
    d_mu = reduce(torch.add, [d_theta for d_theta, _ in sampled])
    d_sigma = reduce(torch.add, [d_theta * noise for (d_theta, _), noise in zip(sampled, draws, strict=True)])
    return d_mu, d_sigma, reduce(torch.add, [loss for _, loss in sampled]), thetas[-1]


def on_objective(step: Step, q: MeanField, w: MeanField, zeta: float) -> Step:
    """Return ``(∂/∂μ, ∂/∂σ) -> None`` of the likelihood, a step on Ω by one in (μ, ρ) (eq. 27)."""

    def descend(d_mu: Tensor, d_sigma: Tensor) -> None:
        add_posterior_gradient(d_mu, d_sigma, q, w, zeta)
        step(d_mu, d_sigma.mul_(q.slope))

    return descend


def by_gradient(gaussian: MeanField, lr: Tensor) -> Step:
    """Return ``(∂/∂μ, ∂/∂ρ) -> None``, a step of gradient descent in place at rate ``lr`` ``[g, 1]``."""

    def step(d_mu: Tensor, d_rho: Tensor) -> None:
        gaussian.mu.addcmul_(d_mu, lr, value=-1)
        gaussian.rho.addcmul_(d_rho, lr, value=-1)
        gaussian.refresh()

    return step


@dataclass(frozen=True, eq=False)
class AdamMoments:
    """Adam's state for g clients, changed in place."""

    of: Tensor  # [g, 2, 2, 2, d]: of q and w, first and second, of μ and ρ
    steps: Tensor  # [g, 1] float32, steps made so far, by q as by w

    @classmethod
    def none(cls, v: Tensor) -> Self:
        """Return the state of clients with v ``[g, 2, d]`` that have made no step."""
        g, _, d = v.shape
        return cls(v.new_zeros(g, 2, 2, 2, d), v.new_zeros(g, 1, dtype=torch.float32))


def by_adam(gaussian: MeanField, lr: float, moments: AdamMoments, place: int, memory: list[Tensor]) -> Step:
    """Return ``(∂/∂μ, ∂/∂ρ) -> None``, a step of Adam in place; ``place`` is 0 for the moments of q, 1 for those of w.

    Every client is a separate parameter, since clients may have made different numbers of steps, which ``memory`` gets.
    """
    values = [*gaussian.mu, *gaussian.rho]
    first, second = ([*part[:, MU], *part[:, RHO]] for part in moments.of[:, place].unbind(1))
    steps = [count.clone() for count in [*moments.steps[:, 0]] * 2]
    memory += steps

    def step(d_mu: Tensor, d_rho: Tensor) -> None:
        adam_(values, [*d_mu, *d_rho], first, second, steps, lr)
        gaussian.refresh()

    return step


# --- settings ---------------------------------------------------------------------------------------------------------


class PFedBayesSettings(Settings):
    """Keys of ``algorithm`` for pFedBayes."""

    steps: int = Field(default=20, ge=1, description="R, local steps of a round: each one of q_i and one of w")
    batch_size: int = Field(default=50, ge=1, description="b; a client with fewer examples uses them all")
    samples: int = Field(default=1, ge=1, description="K, Monte Carlo samples of θ in a step (eq. 27)")
    zeta: float = Field(default=10.0, ge=0, description="ζ, weight of KL(q_i ‖ w) (eq. 5)")
    rho: float = Field(default=-2.5, description="ρ of every parameter at the start: σ = softplus(ρ)")
    noise: float = Field(
        default=1.0,
        ge=0,
        description="deviation of g in θ = μ + σ g (eq. 26), in training and in prediction; with a value below 1, as "
        "in public code (0.001), θ is not drawn from q",
    )
    optimizer: Literal["gd", "adam", "ivon"] = Field(
        default="gd",
        description="gradient descent; Adam, whose moments are fresh at every visit unless kept; or IVON for q_i and "
        "Adam for w",
    )
    betas: Betas | None = Field(
        default=None, description="decay rates of ivon's momentum and Hessian; null: those of its paper, [0.9, 0.99999]"
    )
    moments: Literal["fresh", "kept"] = Field(
        default="fresh", description="kept: Adam's moments are part of a client's state, and continue at its next visit"
    )
    lr_personal: float = Field(default=0.001, gt=0, description="η₁, learning rate of q_i")
    lr_global: float = Field(default=0.001, gt=0, description="η₂, learning rate of w on the client")
    objective: Literal["total", "mean"] = Field(
        default="total",
        description="total: eq. 27, a sum over the n examples; mean: that sum over n, so that steps of "
        "gd do not grow with n",
    )
    beta: float = Field(default=1.0, gt=0, description="β, step of the server to the clients' average")
    aggregation: Literal["parameters", "moments"] = Field(
        default="parameters", description="average (μ, ρ) (Algorithm 1), or match the moments (Lemma A.2)"
    )
    averaged: int | None = Field(
        default=None,
        ge=1,
        description=(
            "S, the number of answering clients drawn for the average; null: all. With every client in the cohort, "
            "this is Algorithm 1, in which all N train"
        ),
    )
    reset: bool = Field(default=False, description="start q_i at the global distribution at every visit")
    draws: int = Field(
        default=10, ge=0, description="S, number of networks whose predictions are averaged; 0: the mean network alone"
    )
    personalize_steps: int = Field(default=20, ge=0, description="steps that derive q_i for a client without one")

    @model_validator(mode="after")
    def _has_moments(self) -> Self:
        if self.moments == "kept" and self.optimizer != "adam":
            raise ValueError("moments: kept needs optimizer: adam, because gradient descent has no moments")
        return self

    @model_validator(mode="after")
    def _fits_ivon(self) -> Self:
        if self.optimizer != "ivon":
            if self.betas is not None:
                raise ValueError(f"betas: only ivon uses them (got optimizer: {self.optimizer}); leave betas out")
            return self
        if not self.zeta:
            raise ValueError("zeta: ivon needs a prior of weight above 0 (got 0); raise zeta, or set optimizer to adam")
        if self.noise != 1:
            raise ValueError(
                f"noise: ivon estimates the Hessian from draws of q_i itself (got {self.noise:g}); set it to 1"
            )
        return self

    @model_validator(mode="after")
    def _check_stability(self) -> Self:
        if reason := unstable(self, self.lr_personal if self.objective == "total" else 0.0, softplus(self.rho)):
            raise ValueError(reason)
        return self


def unstable(s: PFedBayesSettings, lr_q: float, sigma: float) -> str | None:
    """Return why gradient descent on ζ·KL, a parabola of curvature ζ/σ_w² in μ, would diverge; None if it would not."""
    bound = 2 * sigma**2
    for name, rate in (("zeta · lr_personal", s.zeta * lr_q), ("lr_global", s.lr_global)):
        if s.optimizer == "gd" and rate >= bound:
            return (
                f"{name}: {rate:.3g} is too large, because gradient descent on KL(q_i ‖ w) diverges from 2σ_w² = "
                f"{bound:.3g} on (σ_w = {sigma:.3g}); lower it, or use optimizer: adam, which has no such bound"
            )
    return None


# --- messages ---------------------------------------------------------------------------------------------------------


class GlobalGaussian(Message):
    """Opening of training: the global distribution v."""

    v: Tensor = broadcast(Quantity.GAUSSIAN)  # [2, d]


class LocalizedGaussian(Message):
    """Global distribution v_{w,R} after R local steps."""

    v: Tensor = rows(Quantity.GAUSSIAN, 2, "d")  # [c, 2, d]
    steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64, mean over steps and samples of the batch's mean NLL


class Prior(Message):
    """Opening of personalization: the global distribution v."""

    v: Tensor = broadcast(Quantity.GAUSSIAN)  # [2, d]


class PFedBayes(base.Algorithm):
    """Personal Gaussians over θ under a shared prior."""

    name = "pfedbayes"
    settings = PFedBayesSettings
    example = {"steps": 2, "batch_size": 4, "optimizer": "adam", "draws": 3}
    needs = ("labels", "any vector")
    no_sums = "needs each client's own Gaussian at the server; set aggregation to parameters and averaged to null"
    server = PFedBayesServer
    client = PFedBayesClient
    messages = (GlobalGaussian, LocalizedGaussian, Prior)
    predictors = {"personal": "pFedBayes", "global": "pFedBayes, global model"}
    no_example_privacy = None  # steps of q_i follow from noisy gradients at samples of θ, which do not depend on data

    def noisy_steps(self, settings: Any, examples: int, *, personalizing: bool = False) -> tuple[NoisySteps, ...]:
        """Return the steps of q_i, each with K gradients of one batch."""
        return () if personalizing else (NoisySteps(settings.batch_size, settings.steps, settings.samples),)

    def sums(self, settings: PFedBayesSettings) -> SummedFields:
        """Return the sum of the changes of the parameters; matched moments, or a part of the answers, need more."""
        if settings.aggregation != "parameters" or settings.averaged is not None:
            return {}
        return sums_of(LocalizedGaussian, v=Summed(since="v"))


PFEDBAYES = PFedBayes()
