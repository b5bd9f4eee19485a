"""pFedBayes: every client's model is a Gaussian over θ, the shared one is its prior.

X. Zhang et al., Personalized federated learning via variational Bayesian inference, ICML 2022 (papers/003): problem
(4)-(5), Algorithm 1. A client keeps its q_i = N(μ, softplus(ρ)²) between rounds. In a round it alternates R steps of
q_i on its personal objective and of its own copy of the global distribution w on KL(q_i ‖ w), and uploads that copy.
What the paper leaves open, and measurements: docs/algorithms/pfedbayes.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor
from torch.func import grad, vmap

from fedloom.algorithms.base import (
    Algorithm,
    ClientHalf,
    Cohort,
    Conversation,
    Group,
    Predictor,
    Round,
    ServerHalf,
    Shapes,
    Statistics,
    Task,
    opened_by,
)
from fedloom.algorithms.gaussian import (
    MU,
    RHO,
    MeanField,
    add_posterior_gradient,
    gaussian,
    matched_moments,
    prior_gradient,
    softplus,
)
from fedloom.algorithms.training import batches, labelled
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.flat import FlatModel
from fedloom.settings import Settings


@dataclass(frozen=True, eq=False)
class GlobalGaussian(Message):
    """Opens training: the global distribution v."""

    v: Tensor = broadcast(Quantity.GAUSSIAN)  # [2, d]


@dataclass(frozen=True, eq=False)
class LocalizedGaussian(Message):
    """The global distribution after R local steps, v_{w,R}."""

    v: Tensor = rows(Quantity.GAUSSIAN)  # [c, 2, d]
    steps: Tensor = rows(Quantity.COUNT)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS)  # [c, 1] float64, mean over steps and samples of the batch's mean NLL


@dataclass(frozen=True, eq=False)
class Prior(Message):
    """Opens personalization: the global distribution v."""

    v: Tensor = broadcast(Quantity.GAUSSIAN)  # [2, d]


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


class PFedBayesServer(ServerHalf):
    """v ← (1 - β) v + β · average of the localized global distributions."""

    def __init__(self, settings: PFedBayesSettings, task: Task, generator: torch.Generator) -> None:
        self.settings = settings
        self.v = gaussian(task.model.init(generator, task.dtype), settings.rho)

    def state(self) -> dict[str, Tensor]:
        """The global distribution."""
        return {"v": self.v}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over the global distribution."""
        self.v = state["v"]

    def shapes(self) -> Shapes:
        """Distributions of the size of v."""
        return {LocalizedGaussian: {"v": tuple(self.v.shape), "steps": (1,), "loss": (1,)}}

    def train_round(self, round: Round) -> Statistics:
        """One round of Algorithm 1."""
        cohort = round.sample()
        updated = cohort.send(GlobalGaussian(self.v))
        average = self._matched(updated) if self.settings.aggregation == "moments" else updated.mean(updated.v)
        v = torch.lerp(self.v, average, self.settings.beta)
        if not torch.isfinite(v).all():
            raise FloatingPointError("the global distribution is not finite after this update")
        self.v = v
        return {"client_steps": updated.total(updated.steps), "loss": float(updated.mean(updated.loss))}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the global distribution; the client has its own, or makes one from it."""
        return cohort.send(Prior(self.v))

    def _matched(self, updated: Replies[LocalizedGaussian]) -> Tensor:
        """Lemma A.2 over the clients that answered."""
        clients = MeanField(updated.v)
        mu = updated.mean(clients.mu)
        return matched_moments(mu, updated.mean(clients.sigma.square() + (clients.mu - mu).square()))


class PFedBayesClient(ClientHalf):
    """ClientUpdate of Algorithm 1; q_i is the client's state between rounds."""

    predictors = ("personal", "global")
    stateful: ClassVar[bool] = True

    def __init__(self, settings: PFedBayesSettings, task: Task) -> None:
        self.settings = settings
        self.task = task

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """``personalize_steps`` for ``personal``."""
        del examples
        return self.settings.personalize_steps if predictor == "personal" else 0

    @opened_by(GlobalGaussian)
    def train(self, clients: Group, opening: GlobalGaussian) -> Conversation:
        """ClientUpdate(i, v) of Algorithm 1."""
        s, members = self.settings, range(len(clients))
        kept = [None if s.reset else clients.state(i) for i in members]
        q = MeanField(torch.stack([opening.v if state is None else state["v"].to(opening.v) for state in kept]))
        w = MeanField(opening.v.expand(len(clients), -1, -1))
        loss = local_steps(self.task.model, q, w, clients, members, s, s.steps, "train")
        for i, v in enumerate(q.v):
            clients.keep(i, {"v": v.clone()})
        yield LocalizedGaussian(w.v, torch.full_like(loss, s.steps), loss)
        return None

    @opened_by(Prior)
    def personalize(self, clients: Group, opening: Prior) -> Conversation:
        """``personal`` is the q_i that the client kept, or one made from the prior; ``global`` is the prior."""
        s = self.settings
        kept = [clients.state(i) for i in range(len(clients))]
        v = torch.stack([opening.v if state is None else state["v"].to(opening.v) for state in kept])
        new = [i for i, state in enumerate(kept) if state is None]
        if new and s.personalize_steps:
            q, w = MeanField(v[new]), MeanField(opening.v.expand(len(new), -1, -1))
            local_steps(self.task.model, q, w, clients, new, s, s.personalize_steps, "personalize", localize=False)
            v[new] = q.v
        predictors: list[dict[str, Predictor]] = []
        for i in range(len(clients)):
            named = {"personal": v[i], "global": opening.v}
            predictors.append({name: self._predictor(of, clients.generator(i, name)) for name, of in named.items()})
        return predictors
        yield  # a coroutine without an answer of its own

    def _predictor(self, v: Tensor, generator: torch.Generator) -> BayesianPredictor:
        noise = torch.randn(self.settings.draws, v.shape[-1], generator=generator, dtype=v.dtype)
        return BayesianPredictor(self.task.model, v, noise.to(v.device))


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
    FloatingPointError
        If training diverged.
    """
    data = [labelled(clients.clients[i]) for i in members]
    indices = zip(
        *(
            batches(len(x), s.batch_size, steps, clients.generator(i, purpose))
            for i, (x, _) in zip(members, data, strict=True)
        ),
        strict=True,
    )
    noises = [clients.generator(i, f"{purpose}-noise") for i in members]
    likelihood: Likelihood = (OneClient if len(data) == 1 else SeveralClients)(model, data, s.samples)
    n = torch.tensor([[len(x)] for x, _ in data], dtype=q.mu.dtype, device=q.mu.device)
    _check_stability(s, n, w)
    descend_q: Optimizer = Adam(q, s.lr_personal) if s.optimizer == "adam" else GradientDescent(q, _lr(s, n))
    lr_w = torch.full_like(n, s.lr_global)
    descend_w: Optimizer = Adam(w, s.lr_global) if s.optimizer == "adam" else GradientDescent(w, lr_w)
    losses = torch.zeros(len(data), dtype=torch.float64, device=n.device)
    for index in indices:
        draws = [_normals(q.mu, noises) for _ in range(s.samples)]
        sampled = [likelihood.gradient(q.sample(noise), index) for noise in draws]
        d_mu = reduce(torch.add, [d_theta for d_theta, _ in sampled])
        d_sigma = reduce(torch.add, [d_theta * noise for (d_theta, _), noise in zip(sampled, draws, strict=True)])
        losses += reduce(torch.add, [loss for _, loss in sampled])
        add_posterior_gradient(d_mu, d_sigma, q, w, s.zeta)
        descend_q.step(d_mu, d_sigma.mul_(q.slope))
        if localize:
            descend_w.step(*prior_gradient(q, w))
    losses /= steps * s.samples
    _check_finite(clients, members, s, losses, q)
    return losses[:, None]


def _lr(s: PFedBayesSettings, n: Tensor) -> Tensor:
    """The step of gradient descent on Ω, ``[g, 1]``."""
    return s.lr_personal / n if s.objective == "mean" else torch.full_like(n, s.lr_personal)


def _normals(like: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Standard normals ``[g, d]``, each client's from its own generator, drawn on the CPU."""
    noise = torch.empty(like.shape, dtype=like.dtype)
    for row, generator in zip(noise, generators, strict=True):
        row.normal_(generator=generator)
    return noise.to(like.device)


def _check_stability(s: PFedBayesSettings, n: Tensor, prior: MeanField) -> None:
    """Refuse gradient descent whose step on ζ·KL, a parabola of curvature ζ/σ_w² in μ, would diverge."""
    if s.optimizer == "gd":
        bound = 2 * float(prior.sigma.min()) ** 2
        for what, found in (("ζ·η₁", s.zeta * float(_lr(s, n).max())), ("η₂", s.lr_global)):
            if found >= bound:
                raise ExperimentError(_unstable(what, found, bound))


def _check_finite(clients: Group, members: Sequence[int], s: PFedBayesSettings, losses: Tensor, q: MeanField) -> None:
    """Say which client diverged, and what its step was."""
    fine = losses.isfinite() & (q.mu + q.rho).isfinite().all(1)
    for i, good in zip(members, fine.tolist(), strict=True):
        if not good:
            n = len(clients.clients[i].train)
            step = f"; a step of gradient descent is n·η₁ = {n * s.lr_personal:.3g} per example" if _steep(s) else ""
            raise FloatingPointError(
                f"client {clients.clients[i].id}: training diverged (n = {n}, lr_personal {s.lr_personal:g}, "
                f"optimizer {s.optimizer}, objective {s.objective}{step}); allowed: a smaller lr_personal, "
                "objective: mean, or optimizer: adam"
            )


def _steep(s: PFedBayesSettings) -> bool:
    """Whether steps grow with n."""
    return s.optimizer == "gd" and s.objective == "total"


# --- the likelihood's gradient ----------------------------------------------------------------------------------------


class Likelihood(Protocol):
    """−log p(D_i | θ), estimated on batches."""

    def gradient(self, theta: Tensor, index: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Derivative of n/(bK) Σ_j −log p(D_j | θ) over a batch, and the mean of its terms: ``[g, d], [g]``.

        Parameters
        ----------
        theta
            ``[g, d]``.
        index
            Each client's batch.
        """


class OneClient:
    """On a CPU: ``autograd.grad`` on the leaves of one θ."""

    def __init__(self, model: FlatModel, data: Sequence[tuple[Tensor, Tensor]], samples: int) -> None:
        self.model = model
        ((self.x, self.y),) = data
        self.weight = len(self.x) / samples

    def gradient(self, theta: Tensor, index: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """``[1, d], [1]``."""
        leaves = self.model.layout.leaves(theta[0], requires_grad=True)
        loss = F.cross_entropy(self.model.forward(leaves, self.x[index[0]]), self.y[index[0]])
        parts = torch.autograd.grad(self.weight * loss, list(leaves.values()))
        return self.model.layout.join(dict(zip(leaves, parts, strict=True)))[None], loss.detach()[None]


class SeveralClients:
    """On a GPU: ``vmap(grad)`` over the clients, batches padded with weight 0 to one size."""

    def __init__(self, model: FlatModel, data: Sequence[tuple[Tensor, Tensor]], samples: int) -> None:
        self.data = data
        self.weights = [len(x) / samples for x, _ in data]

        def objective(theta: Tensor, x: Tensor, y: Tensor, share: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            loss = (F.cross_entropy(model.logits(theta, x), y, reduction="none") * share).sum()
            return weight * loss, loss

        self._gradient = vmap(grad(objective, has_aux=True))

    def gradient(self, theta: Tensor, index: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """``[g, d], [g]``."""
        device, dtype = theta.device, theta.dtype
        width = max(len(picked) for picked in index)
        padded = [F.pad(picked, (0, width - len(picked))).to(device) for picked in index]
        xs = torch.stack([x[picked] for (x, _), picked in zip(self.data, padded, strict=True)])
        ys = torch.stack([y[picked] for (_, y), picked in zip(self.data, padded, strict=True)])
        sizes = torch.tensor([len(picked) for picked in index], device=device)[:, None]
        shares = (torch.arange(width, device=device) < sizes).to(dtype) / sizes
        weights = torch.tensor(self.weights, dtype=dtype, device=device)
        gradient, loss = self._gradient(theta, xs, ys, shares, weights)
        return gradient, loss


# --- the two optimizers -----------------------------------------------------------------------------------------------


class Optimizer(Protocol):
    """Changes a Gaussian."""

    def step(self, d_mu: Tensor, d_rho: Tensor) -> None:
        """One step in place; the gradients may be used up."""


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
    """D. Kingma, J. Ba, Adam, ICLR 2015, Algorithm 1, with its β₁, β₂ and ε; one pass over memory per step."""

    def __init__(self, of: MeanField, lr: float) -> None:
        self.of = of
        self.lr = lr
        self.mean = [torch.zeros_like(of.mu), torch.zeros_like(of.mu)]
        self.square = [torch.zeros_like(of.mu), torch.zeros_like(of.mu)]
        self.count = torch.zeros((), device=of.mu.device)

    def step(self, d_mu: Tensor, d_rho: Tensor) -> None:
        """One step, in place."""
        self.count += 1
        torch._fused_adam_(
            [self.of.mu, self.of.rho],
            [d_mu, d_rho],
            self.mean,
            self.square,
            [],
            [self.count, self.count],
            lr=self.lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        self.of.refresh()


# --- prediction -------------------------------------------------------------------------------------------------------


class BayesianPredictor:
    """Bayesian model averaging: the mean of the class probabilities of S networks drawn from N(μ, σ²).

    Parameters
    ----------
    v
        ``[2, d]``.
    noise
        ``[S, d]`` standard normals; without any (S = 0) the mean network predicts alone.
    """

    def __init__(self, model: FlatModel, v: Tensor, noise: Tensor) -> None:
        self.model = model
        self.v = v
        thetas = MeanField(v).sample(noise) if len(noise) else v[None, MU]
        self.networks = [model.layout.leaves(theta) for theta in thetas]

    @torch.no_grad()
    def draws_log_probabilities(self, x: Tensor) -> Tensor:
        """Each network's prediction, ``[b, ...] -> [S, b, C]``."""
        return torch.stack([F.log_softmax(self.model.forward(network, x), dim=1) for network in self.networks])

    def log_probabilities(self, x: Tensor) -> Tensor:
        """``[b, ...] -> [b, C]`` log of the mean probability."""
        return self.draws_log_probabilities(x).logsumexp(0) - math.log(len(self.networks))

    def probabilities(self, x: Tensor) -> Tensor:
        """``[b, ...] -> [b, C]``; rows sum to one."""
        return self.log_probabilities(x).exp()

    def tensors(self) -> dict[str, Tensor]:
        """μ and ρ, each ``[d]``."""
        return {"mu": self.v[MU], "rho": self.v[RHO]}


PFEDBAYES = Algorithm(
    name="pfedbayes",
    version=1,
    settings=PFedBayesSettings,
    server=PFedBayesServer,
    client=PFedBayesClient,
    messages=(GlobalGaussian, LocalizedGaussian, Prior),
)
