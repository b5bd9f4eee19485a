"""ComFedL: compositional federated learning (papers/002: Huang, Li).

Minimizes (1/n) Σ g^i(f^i(w)) (papers/002, eq. 1) by local steps along ∇g^i(f^i(w))ᵀ ∇f^i(w) and a uniform mean. Two
instances: distributionally robust averaging (eq. 6), where f^i is the client's loss, and ComFedL-DAMAML (eq. 10), where
f^i is one inner gradient step; g^i takes the exponential of a loss in both. Taken literally that exponential leaves the
range in which SGD can work, so there are two more ways to scale it (docs/algorithms/comfedl.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor
from torch.func import vmap

from fedloom.algorithms.base import (
    Algorithm,
    ClientHalf,
    Cohort,
    Conversation,
    Group,
    Round,
    ServerHalf,
    Shapes,
    Statistics,
    Task,
    opened_by,
)
from fedloom.algorithms.training import LocalSGD, batches, labelled, local_sgd, predictors_of
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.flat import FlatModel
from fedloom.settings import Settings

PIECE = 512
"""Examples that are looked at together where a loss is that of all of a client's data."""

NOT_FINITE = torch.finfo(torch.float64).max
"""What a client reports in place of a loss that is not finite."""

# --- Lemma 1 ----------------------------------------------------------------------------------------------------------


def regularized_loss(losses: Tensor, weights: Tensor, gamma: float) -> Tensor:
    """Σ r_i f_i - γ Σ r_i log(n r_i), maximized by the adversary r (papers/002, eq. 4 with the KL divergence; eq. 14).

    Parameters
    ----------
    losses
        f ``[n]``.
    weights
        r ``[n]`` on the simplex.
    gamma
        γ > 0.

    Returns
    -------
    Tensor
        A scalar.
    """
    divergence: Tensor = torch.special.xlogy(weights, len(weights) * weights).sum()
    return (weights * losses).sum() - gamma * divergence


def optimal_weights(losses: Tensor, gamma: float) -> Tensor:
    """The r that maximizes :func:`regularized_loss`: r_i = exp(f_i/γ) / Σ exp(f_j/γ) (papers/002, Lemma 1, eq. 17-18).

    Parameters
    ----------
    losses
        f ``[n]``.
    gamma
        γ > 0: the smaller, the more of the weight is with the largest loss.

    Returns
    -------
    Tensor
        r ``[n]``, on the simplex.
    """
    return torch.softmax(losses / gamma, dim=0)


def composed_loss(losses: Tensor, gamma: float) -> Tensor:
    """γ log((1/n) Σ exp(f_i/γ)), the largest value of :func:`regularized_loss` (papers/002, Lemma 1, eq. 5 and 21).

    Parameters
    ----------
    losses
        f ``[n]``.
    gamma
        γ > 0.

    Returns
    -------
    Tensor
        A scalar between the mean and the maximum of f.
    """
    largest = losses.max()
    above: Tensor = gamma * torch.exp((losses - largest) / gamma).mean().log()
    return largest + above


# --- what travels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SharedModel(Message):
    """Opens training (Algorithm 1, line 4)."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


@dataclass(frozen=True, eq=False)
class LossThere(Message):
    """The client's loss at the shared model, before any step; not part of the literal form."""

    loss: Tensor = rows(Quantity.LOSS)  # [c, 1] float64


@dataclass(frozen=True, eq=False)
class Shift(Message):
    """What is subtracted from losses before their exponential is taken; not part of the literal form."""

    shift: Tensor = broadcast(Quantity.OTHER)  # [1] float64


@dataclass(frozen=True, eq=False)
class ModelUpdate(Message):
    """w_τ - w̄ (Algorithm 1, line 15), and what the training was like."""

    delta_theta: Tensor = rows(Quantity.MODEL_UPDATE)  # [c, d], zero if the finite range was left
    steps: Tensor = rows(Quantity.COUNT)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS)  # [c, 1] float64, mean over the steps
    first: Tensor = rows(Quantity.LOSS)  # [c, 1] float64, of the first step's batch at the shared model
    left: Tensor = rows(Quantity.COUNT)  # [c, 1] float64, step (1 ... τ) at which the finite range was left, or 0
    left_loss: Tensor = rows(Quantity.LOSS)  # [c, 1] float64, the loss at that step


@dataclass(frozen=True, eq=False)
class Adapt(Message):
    """Opens personalization: the shared model."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


# --- settings ---------------------------------------------------------------------------------------------------------


class LocalSteps(LocalSGD):
    """Lines 7-14 of Algorithm 1. λ_θ, momentum and clipping, which the paper has not, act on u, outside g."""

    steps: int | None = Field(default=5, ge=1, description="τ, the synchronization gap; null where epochs is given")
    lr: float = Field(default=0.01, gt=0, description="η")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum, fresh at every visit; the paper has none")
    outer_batch_size: int | None = Field(
        default=None, ge=1, description="b₁, the size of the second batch (damaml); null is batch_size"
    )


class ComFedLSettings(Settings):
    """Keys of ``algorithm`` for ComFedL."""

    objective: Literal["robust", "damaml"] = Field(
        default="robust", description="distributionally robust averaging (eq. 6), or ComFedL-DAMAML (eq. 10)"
    )
    gamma: float = Field(
        default=0.2, gt=0, description="γ; the smaller, the more the client with the largest loss counts"
    )
    scale: Literal["literal", "largest", "normalized"] = Field(
        default="normalized",
        description="factor on a client's gradient: exp(f/γ)/γ; that, divided by the exponential of the largest loss; "
        "or the one with which the mean is the gradient of eq. 5",
    )
    factor_at: Literal["step", "round"] | None = Field(
        default=None,
        description="step: the factor is that of each local step's batch (line 11); round: that of the loss at the "
        "shared model, held over the steps; null is step for literal, round for the others",
    )
    losses_on: Literal["all", "batch"] = Field(
        default="all",
        description="data of the loss that a round is scaled by: a client's train split, or one batch of it",
    )
    local: LocalSteps = Field(default=LocalSteps(), description="local training in a round")
    inner_lr: float = Field(default=0.05, gt=0, description="η in w - η∇f(w) of eq. 10 (damaml), in adapting too")
    first_order: bool = Field(default=False, description="damaml: take the derivative of w - η∇f(w) to be the identity")
    adapt_steps: int | None = Field(
        default=None,
        ge=0,
        description="SGD steps by which a client makes the shared model its own; null is 1 for damaml, 0 for robust",
    )

    @model_validator(mode="after")
    def _fit_the_objective(self) -> Self:
        if self.scale == "literal" and self.factor_at == "round":
            raise ValueError(
                "factor_at: found round with scale literal, which asks for no loss before training; allowed: step, or "
                "scale largest or normalized"
            )
        if self.objective == "robust" and self.first_order:
            raise ValueError("first_order: found true with objective robust; allowed: with objective damaml")
        if self.objective == "robust" and self.local.outer_batch_size is not None:
            raise ValueError(
                f"local.outer_batch_size: found {self.local.outer_batch_size} with objective robust, which has no "
                "second batch; allowed: null, or objective damaml"
            )
        return self

    @property
    def holds(self) -> bool:
        """Whether a client's factor is held over the steps of a round."""
        return self.factor_at == "round" if self.factor_at is not None else self.scale != "literal"

    @property
    def adaptation(self) -> LocalSGD | None:
        """How ``personal`` is made of the shared model; None if the two are one."""
        damaml = self.objective == "damaml"
        steps = int(damaml) if self.adapt_steps is None else self.adapt_steps
        if not steps:
            return None
        local = self.local
        if damaml:  # the inner step of eq. 10
            return LocalSGD(
                steps=steps, batch_size=local.batch_size, lr=self.inner_lr, momentum=0.0, mask_absent=local.mask_absent
            )
        return LocalSGD.model_validate(
            local.model_dump(exclude={"outer_batch_size"}) | {"steps": steps, "epochs": None}
        )

    def factor(self, loss: Tensor, shift: Tensor) -> Tensor:
        """∇g at a client's loss, up to what ``scale`` divides by (papers/002, below eq. 6; line 11).

        Parameters
        ----------
        loss
            f ``[g]``.
        shift
            ``[1]`` float64: 0 (literal), the largest loss (largest), :func:`composed_loss` (normalized).

        Returns
        -------
        Tensor
            ``[g]`` of the loss's type: exp((f - shift)/γ), divided by γ unless the scale is ``normalized``. Infinite
            where that type cannot hold it.
        """
        exponential = ((loss.double() - shift) / self.gamma).exp()
        return (exponential if self.scale == "normalized" else exponential / self.gamma).to(loss.dtype)


# --- the server -------------------------------------------------------------------------------------------------------


class ComFedLServer(ServerHalf):
    """w̄ ← the uniform mean of w_τ^i over the clients that answered."""

    def __init__(self, settings: ComFedLSettings, task: Task, generator: torch.Generator) -> None:
        self.settings = settings
        self.theta = task.model.init(generator, task.dtype)

    def state(self) -> dict[str, Tensor]:
        """The shared model."""
        return {"theta": self.theta}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over the shared model."""
        self.theta = state["theta"]

    def shapes(self) -> Shapes:
        """Updates of the size of θ, and scalars."""
        scalars = dict.fromkeys(("steps", "loss", "first", "left", "left_loss"), (1,))
        return {LossThere: {"loss": (1,)}, ModelUpdate: {"delta_theta": tuple(self.theta.shape), **scalars}}

    def train_round(self, round: Round) -> Statistics:
        """Algorithm 1, lines 3-17.

        Raises
        ------
        FloatingPointError
            If a client left the finite range, or the mean did; nothing has been changed then. Such a client must not be
            left out of the mean: it is the one with the largest loss.
        """
        cohort = round.sample()  # line 3
        if self.settings.scale == "literal":
            updates = cohort.send(SharedModel(self.theta))  # lines 4-16
            losses = updates.first
        else:
            there = cohort.send(SharedModel(self.theta))
            losses = there.loss
            self._refuse_loss(cohort, losses)
            updates = cohort.send(Shift(self._shift(losses[there.present])))
        self._refuse_divergence(cohort, updates)
        theta = self.theta + updates.mean(updates.delta_theta)  # line 17
        if not torch.isfinite(theta).all():
            raise FloatingPointError("the shared model is not finite after this round")
        self.theta = theta
        clients = [id for id, here in zip(cohort.clients, updates.present.tolist(), strict=True) if here]
        return {
            "client_steps": updates.total(updates.steps),
            "loss": float(updates.mean(updates.loss)),
            **self._lemma_1(clients, losses[updates.present]),
        }

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the shared model; the client adapts it."""
        return cohort.send(Adapt(self.theta))

    def _shift(self, losses: Tensor) -> Tensor:
        """``[c, 1] -> [1]``: max f_j, or the objective (5), whose gradient the mean then is."""
        f = losses.flatten()
        return (f.max() if self.settings.scale == "largest" else composed_loss(f, self.settings.gamma))[None]

    def _lemma_1(self, clients: Sequence[str], losses: Tensor) -> Statistics:
        """The objective (5) and its weights r at the shared model, in short and by client.

        ``effective_clients`` is 1/Σ r²: so many clients of equal weight would be as concentrated.
        """
        f, gamma = losses.flatten(), self.settings.gamma
        r = optimal_weights(f, gamma)
        return {
            "objective": float(composed_loss(f, gamma)),
            "r_largest": float(r.max()),
            "r_smallest": float(r.min()),
            "effective_clients": float(1 / r.square().sum()),
            **{f"r.{client}": weight for client, weight in zip(clients, r.tolist(), strict=True)},
        }

    def _refuse_loss(self, cohort: Cohort, losses: Tensor) -> None:
        for client, loss in zip(cohort.clients, losses[:, 0].tolist(), strict=True):
            if loss >= NOT_FINITE:
                raise FloatingPointError(
                    f"the loss of {client} at the shared model is not finite; allowed: a smaller local.lr "
                    f"(found {self.settings.local.lr:g}), a larger gamma (found {self.settings.gamma:g})"
                )

    def _refuse_divergence(self, cohort: Cohort, updates: Replies[Any]) -> None:
        for client, step, loss in zip(
            cohort.clients, updates.left[:, 0].tolist(), updates.left_loss[:, 0].tolist(), strict=True
        ):
            if step:
                s = self.settings
                factor = "exp(f/γ)/γ" if s.scale == "literal" else f"exp(f/γ), scaled {s.scale},"
                f = f"f = {loss:.4g}" if loss < NOT_FINITE else "f not finite"
                others = "scale: largest or normalized, " if s.scale == "literal" else ""
                raise FloatingPointError(
                    f"{factor} or the step along it left the finite range on {client} at local step {step:.0f}, "
                    f"with {f} and γ = {s.gamma:g}; allowed: {others}a smaller local.lr (found {s.local.lr:g}), "
                    "a larger gamma"
                )


# --- the clients ------------------------------------------------------------------------------------------------------

Parameters: TypeAlias = dict[str, Tensor]
"""w: named tensors of one client's model, or ``{"theta": [g, d]}`` of several clients'."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Examples and their weights in a mean, all that is computed at once: ``[b, ...]``, or ``[g, b, ...]``."""

    x: Tensor
    y: Tensor
    weight: Tensor


class Losses(ABC):
    """The loss f^i(w; B) of each client of a group, and its gradient, as functions of w that autograd can derive twice.

    A loss is that of a batch in pieces: one for a mini-batch, several for all data of a client. A derivative of the sum
    of the group's losses has each client's own derivative in its own parameters.
    """

    w: Parameters

    def __init__(self, model: FlatModel, clients: Group, settings: LocalSteps) -> None:
        self.model = model
        self.data = [labelled(client) for client in clients.clients]
        self.mask_absent = settings.mask_absent

    @abstractmethod
    def piece(self, index: Sequence[Tensor], sizes: Sequence[int]) -> Piece:
        """The examples ``index[i]`` of each client, each with weight 1/``sizes[i]``."""

    @abstractmethod
    def of_piece(self, w: Parameters, piece: Piece) -> Tensor:
        """Each client's weighted sum of cross entropies, ``[g]``."""

    @abstractmethod
    def each(self, values: Tensor) -> Tensor:
        """Shape one number per client ``[g]`` so that it multiplies a client's parameters."""

    @abstractmethod
    def norm(self, gradient: list[Tensor]) -> Tensor:
        """Each client's gradient norm, ``[g]``."""

    @abstractmethod
    def theta(self) -> Tensor:
        """w as ``[g, d]``."""

    def batch(self, index: Sequence[Tensor]) -> list[Piece]:
        """One mini-batch of each client."""
        return [self.piece(index, [len(picked) for picked in index])]

    def all(self) -> list[Piece]:
        """All train data of each client."""
        sizes = [len(x) for x, _ in self.data]
        splits = [torch.split(torch.arange(n), PIECE) for n in sizes]
        none = torch.arange(0)
        return [
            self.piece([split[k] if k < len(split) else none for split in splits], sizes)
            for k in range(max(len(split) for split in splits))
        ]

    def value(self, w: Parameters, batch: Sequence[Piece]) -> Tensor:
        """f^i(w; B), ``[g]`` (line 9)."""
        return torch.stack([self.of_piece(w, piece) for piece in batch]).sum(0)

    def gradient(self, w: Parameters, batch: Sequence[Piece], *, differentiable: bool) -> list[Tensor]:
        """∇f^i(w; B), in the order of w; ``differentiable`` keeps its own graph."""
        parts = []
        for piece in batch:
            with torch.enable_grad():
                loss = self.of_piece(w, piece).sum()
            parts.append(torch.autograd.grad(loss, list(w.values()), create_graph=differentiable))
        return [torch.stack(part).sum(0) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]

    def cross_entropy(self, logits: Tensor, y: Tensor, weight: Tensor, absent: Tensor) -> Tensor:
        """``[b, C] -> []``."""
        if self.mask_absent:
            logits = logits.masked_fill(absent, -torch.inf)
        return (F.cross_entropy(logits, y, reduction="none") * weight).sum()


class LossOfOne(Losses):
    """For CPUs: one split of θ, convolution kernels channels-last."""

    def __init__(self, model: FlatModel, theta: Tensor, clients: Group, settings: LocalSteps) -> None:
        super().__init__(model, clients, settings)
        self.w = model.layout.leaves(theta[0], requires_grad=True)
        self.absent = ~clients.clients[0].present.to(theta.device)

    def piece(self, index: Sequence[Tensor], sizes: Sequence[int]) -> Piece:
        """Examples of the client."""
        (x, y), picked = self.data[0], index[0]
        dtype = next(iter(self.w.values())).dtype
        return Piece(x[picked], y[picked], torch.full((len(picked),), 1 / sizes[0], dtype=dtype, device=y.device))

    def of_piece(self, w: Parameters, piece: Piece) -> Tensor:
        """``[1]``."""
        return self.cross_entropy(self.model.forward(w, piece.x), piece.y, piece.weight, self.absent)[None]

    def each(self, values: Tensor) -> Tensor:
        """A scalar."""
        return values[0]

    def norm(self, gradient: list[Tensor]) -> Tensor:
        """``[1]``."""
        norm: Tensor = torch.stack(torch._foreach_norm(gradient)).norm()
        return norm[None]

    def theta(self) -> Tensor:
        """``[1, d]``."""
        return self.model.layout.join(self.w).detach()[None]


class LossOfSeveral(Losses):
    """For GPUs: ``vmap`` over the group, batches padded with weight 0 to one size."""

    def __init__(self, model: FlatModel, theta: Tensor, clients: Group, settings: LocalSteps) -> None:
        super().__init__(model, clients, settings)
        self.w = {"theta": theta.detach().clone().requires_grad_()}
        self.absent = torch.stack([~client.present for client in clients.clients]).to(theta.device)
        self._losses = vmap(self._loss)

    def piece(self, index: Sequence[Tensor], sizes: Sequence[int]) -> Piece:
        """Examples of every client."""
        device, dtype = self.w["theta"].device, self.w["theta"].dtype
        width = max(len(picked) for picked in index)
        xs, ys, weights = [], [], []
        for (x, y), picked, size in zip(self.data, index, sizes, strict=True):
            padded = F.pad(picked, (0, width - len(picked))).to(device)
            xs.append(x[padded])
            ys.append(y[padded])
            weights.append((torch.arange(width, device=device) < len(picked)).to(dtype) / size)
        return Piece(torch.stack(xs), torch.stack(ys), torch.stack(weights))

    def of_piece(self, w: Parameters, piece: Piece) -> Tensor:
        """``[g]``."""
        losses: Tensor = self._losses(w["theta"], piece.x, piece.y, piece.weight, self.absent)
        return losses

    def each(self, values: Tensor) -> Tensor:
        """``[g, 1]``."""
        return values[:, None]

    def norm(self, gradient: list[Tensor]) -> Tensor:
        """``[g]``."""
        norm: Tensor = gradient[0].norm(dim=1)
        return norm

    def theta(self) -> Tensor:
        """``[g, d]``."""
        return self.w["theta"].detach()

    def _loss(self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor, absent: Tensor) -> Tensor:
        return self.cross_entropy(self.model.logits(theta, x), y, weight, absent)


def losses_of(model: FlatModel, theta: Tensor, clients: Group, settings: LocalSteps) -> Losses:
    """The losses of a group, from θ ``[g, d]``."""
    return (LossOfOne if len(clients) == 1 else LossOfSeveral)(model, theta, clients, settings)


class Composition(ABC):
    """One instance of problem (1): the inner mapping f^i, and the loss ℓ^i whose exponential g^i = exp(ℓ^i/γ) is."""

    two_batches: bool
    """Whether ℓ^i is of a second batch (line 10)."""

    @abstractmethod
    def inner(self, losses: Losses, w: Parameters, batch: Sequence[Piece]) -> Any:
        """f^i_B(w) (line 9)."""

    @abstractmethod
    def outer(self, losses: Losses, y: Any, batch: Sequence[Piece]) -> Tensor:
        """ℓ^i_B̃(y), ``[g]`` (line 11)."""


class Robust(Composition):
    """papers/002, eq. 6: f^i is the client's loss, g(y) = exp(y/γ)."""

    two_batches = False

    def inner(self, losses: Losses, w: Parameters, batch: Sequence[Piece]) -> Tensor:
        """f^i_B(w), ``[g]``."""
        return losses.value(w, batch)

    def outer(self, losses: Losses, y: Tensor, batch: Sequence[Piece]) -> Tensor:
        """y: g is no expectation, there is no second batch."""
        return y


class DAMAML(Composition):
    """papers/002, eq. 10: f^i(w) = w - η∇f_i(w), g^i(y) = exp(f_i(y)/γ)."""

    two_batches = True

    def __init__(self, inner_lr: float, *, first_order: bool) -> None:
        self.inner_lr = inner_lr
        self.first_order = first_order

    def inner(self, losses: Losses, w: Parameters, batch: Sequence[Piece]) -> Parameters:
        """w - η∇f_B(w); its derivative is I - η∇²f_B(w), or I in the first order."""
        gradient = losses.gradient(w, batch, differentiable=torch.is_grad_enabled() and not self.first_order)
        return {name: part - self.inner_lr * slope for (name, part), slope in zip(w.items(), gradient, strict=True)}

    def outer(self, losses: Losses, y: Parameters, batch: Sequence[Piece]) -> Tensor:
        """f_B̃(y), ``[g]``."""
        return losses.value(y, batch)


def composition_of(settings: ComFedLSettings) -> Composition:
    """The instance that these settings name."""
    if settings.objective == "robust":
        return Robust()
    return DAMAML(settings.inner_lr, first_order=settings.first_order)


def loss_there(model: FlatModel, theta: Tensor, clients: Group, settings: ComFedLSettings) -> Tensor:
    """ℓ^i(f^i(w)) at the shared model, θ ``[g, d] -> [g, 1]`` float64."""
    losses = losses_of(model, theta, clients, settings.local)
    composition = composition_of(settings)
    if settings.losses_on == "all":
        first = second = losses.all()
    else:
        first = second = losses.batch([draw[0] for draw in _draws(clients, settings.local, [1] * len(clients), "loss")])
        if composition.two_batches:
            second = losses.batch(
                [draw[0] for draw in _outer_draws(clients, settings, [1] * len(clients), "loss-outer")]
            )
    with torch.no_grad():
        loss = composition.outer(losses, composition.inner(losses, losses.w, first), second)
    return _reported(loss)[:, None]


def compositional_sgd(
    model: FlatModel,
    theta: Tensor,
    clients: Group,
    settings: ComFedLSettings,
    shift: Tensor,
    held: Tensor | None = None,
) -> ModelUpdate:
    """Train one model per client on g^i(f^i(w)) (papers/002, Algorithm 1, lines 6-14).

    Parameters
    ----------
    theta
        ``[g, d]``, where each client starts.
    shift
        ``[1]`` float64, see :meth:`ComFedLSettings.factor`.
    held
        ``[g, 1]``, the losses whose factors are held over the steps; None takes those of each step's batch.
    """
    s, composition, start = settings.local, composition_of(settings), theta
    losses = losses_of(model, theta, clients, s)  # line 6
    w, parameters = losses.w, list(losses.w.values())
    momentum = [torch.zeros_like(part) for part in parameters]
    counts = [s.count(len(x)) for x, _ in losses.data]
    draws = _draws(clients, s, counts, "train")
    outer_draws = _outer_draws(clients, settings, counts, "outer") if composition.two_batches else None
    steps = torch.tensor(counts, device=theta.device)
    first, total, left_loss = (torch.zeros(len(clients), dtype=torch.float64, device=theta.device) for _ in range(3))
    left = torch.zeros_like(steps)
    for t in range(max(counts)):
        batch = losses.batch(_at(draws, t))  # line 8
        outer_batch = batch if outer_draws is None else losses.batch(_at(outer_draws, t))  # line 10
        loss = composition.outer(losses, composition.inner(losses, w, batch), outer_batch)  # lines 9, 11
        slope = torch.autograd.grad(loss.sum(), parameters)
        loss = loss.detach()
        factor = settings.factor(loss if held is None else held[:, 0].to(loss.dtype), shift)
        with torch.no_grad():
            u = [losses.each(factor) * part for part in slope]  # line 12
            if s.lambda_theta:
                u = [part + 2 * s.lambda_theta * parameter for part, parameter in zip(u, parameters, strict=True)]
            if s.clip is not None:
                norm = losses.norm(u)
                u = [part * losses.each((s.clip / (norm + 1e-6)).clamp(max=1)) for part in u]
            going = (t < steps) & (left == 0)
            finite = loss.isfinite() & factor.isfinite()
            left = torch.where(going & ~finite, t + 1, left)
            going = going & finite
            moving = losses.each(going)
            for parameter, moment, part in zip(parameters, momentum, u, strict=True):
                moment.mul_(s.momentum).add_(part)
                # Not by a zero step: zero times a factor that overflowed is NaN, for a client that is done, too.
                parameter.copy_(torch.where(moving, parameter - s.lr * moment, parameter))  # line 13
        seen = _reported(loss)
        left_loss = torch.where(left == t + 1, seen, left_loss)
        first = seen if t == 0 else first
        total = torch.where(going, total + seen, total)
    trained = losses.theta()
    gone = ~trained.isfinite().all(1) & (left == 0)
    left = torch.where(gone, steps, left)
    left_loss = torch.where(gone, seen, left_loss)
    return ModelUpdate(
        torch.where((left == 0)[:, None], trained - start, 0),
        steps.double()[:, None],
        (total / steps)[:, None],
        first[:, None],
        left.double()[:, None],
        left_loss[:, None],
    )


def _reported(loss: Tensor) -> Tensor:
    """A loss as it may travel: a client whose reply is not finite would be left out of the round without a word."""
    return loss.double().nan_to_num(nan=NOT_FINITE, posinf=NOT_FINITE)


def _draws(clients: Group, s: LocalSGD, counts: Sequence[int], purpose: str) -> list[list[Tensor]]:
    """The batches of each client, as indices."""
    return [
        list(batches(len(client.train), s.batch_size, count, clients.generator(i, purpose)))
        for i, (client, count) in enumerate(zip(clients.clients, counts, strict=True))
    ]


def _outer_draws(clients: Group, settings: ComFedLSettings, counts: Sequence[int], purpose: str) -> list[list[Tensor]]:
    """The second batches, from a generator of their own."""
    size = settings.local.outer_batch_size or settings.local.batch_size
    return _draws(clients, settings.local.model_copy(update={"batch_size": size}), counts, purpose)


def _at(draws: Sequence[Sequence[Tensor]], t: int) -> list[Tensor]:
    """Batch t of each client; one that is done repeats its last, and its step is discarded."""
    return [draw[min(t, len(draw) - 1)] for draw in draws]


class ComFedLClient(ClientHalf):
    """Local steps on the composition."""

    predictors = ("personal", "global")

    def __init__(self, settings: ComFedLSettings, task: Task) -> None:
        self.settings = settings
        self.model = task.model

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """``adapt_steps`` for ``personal``."""
        adaptation = self.settings.adaptation
        return adaptation.count(examples) if predictor == "personal" and adaptation is not None else 0

    @opened_by(SharedModel)
    def train(self, clients: Group, opening: SharedModel) -> Conversation:
        """Algorithm 1, lines 5-16."""
        theta = opening.theta.expand(len(clients), -1)
        shift = torch.zeros(1, dtype=torch.float64, device=theta.device)
        held = None
        if self.settings.scale != "literal":
            there = loss_there(self.model, theta, clients, self.settings)
            told = yield LossThere(there)
            shift, held = told.shift, there if self.settings.holds else None
        yield compositional_sgd(self.model, theta, clients, self.settings, shift, held)
        return None

    @opened_by(Adapt)
    def personalize(self, clients: Group, opening: Adapt) -> Conversation:
        """``global`` is the shared model; ``personal`` is that after ``adapt_steps`` steps on the train split."""
        shared = opening.theta.expand(len(clients), -1)
        theta, adaptation = shared, self.settings.adaptation
        if adaptation is not None:
            theta, _, _ = local_sgd(self.model, shared, clients, adaptation, "adapt")
        return predictors_of(self.model, personal=theta, **{"global": shared})
        yield  # a coroutine without an answer of its own


COMFEDL = Algorithm(
    name="comfedl",
    version=1,
    settings=ComFedLSettings,
    server=ComFedLServer,
    client=ComFedLClient,
    messages=(SharedModel, LossThere, Shift, ModelUpdate, Adapt),
)
