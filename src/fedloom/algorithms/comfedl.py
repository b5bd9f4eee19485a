"""ComFedL: compositional federated learning.

F. Huang, J. Li, arXiv 2106.11264 (papers/002). Minimizes (1/n) Σ g^i(f^i(w)) (eq. 1) by local steps along
∇g^i(f^i(w))ᵀ ∇f^i(w) and a uniform mean. There are two instances: distributionally robust averaging (eq. 6), where f^i
is the client's loss, and ComFedL-DAMAML (eq. 10), where f^i is one inner gradient step. In both, g^i takes the
exponential of a loss. The literal form produces values with which SGD fails, so two other scales are available
(docs/algorithms/comfedl.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Conversation, Round, conversation
from fedloom.algorithms.client import LocalTrainer, Parameters, adapt, laid_out, mean_loss
from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.fedavg import PersonalizeRequest, SharedModel, SharedModelServer, Update, or_shared_alone
from fedloom.algorithms.local_sgd import LocalSGD, check_one_batch
from fedloom.algorithms.progress import LoopState
from fedloom.algorithms.sums import SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.messages import LOSS_LIMIT, Message, Quantity, Replies, Sums, broadcast, rows
from fedloom.models.flat import FlatModel
from fedloom.models.predictors import Predictors

NOT_FINITE = LOSS_LIMIT
"""Value that a client reports in place of a loss that is not finite."""

# --- weights of the adversary (papers/002, Lemma 1) -------------------------------------------------------------------


def optimal_weights(losses: Tensor, gamma: float) -> Tensor:
    """Return r = exp(f_i/γ) / Σ exp(f_j/γ), which maximizes Σ r_i f_i - γ KL(r ‖ 1/n), ``[n] -> [n]`` (eq. 17-18)."""
    return torch.softmax(losses / gamma, dim=0)


def composed_loss(losses: Tensor, gamma: float) -> Tensor:
    """Return the maximum at these weights, γ log((1/n) Σ exp(f_i/γ)), between mean and largest loss (eq. 5 and 21)."""
    largest = losses.max()
    above: Tensor = gamma * torch.exp((losses - largest) / gamma).mean().log()
    return largest + above


# --- the server -------------------------------------------------------------------------------------------------------


class ComFedLServer(SharedModelServer):
    """Server of ComFedL: w̄ ← the uniform mean of w_τ^i over the clients that answered."""

    def update_bounds(self, examples: int) -> Mapping[str, float]:
        """Return the bounds of local training, and of the step at which it may leave the finite range."""
        local: LocalSteps = self.settings.local
        return local.update_bounds(examples) | {"left": local.count(examples)}

    def train_round(self, round: Round) -> base.Statistics:
        """Perform Algorithm 1, lines 3-17.

        Raise FloatingPointError if a client left the finite range. That client has the largest loss and must not be
        left out of the mean.
        """
        s, cohort = self.settings, round.sample()  # line 3
        opening = SharedModel(self.state["theta"])
        if s.scale == "literal":
            updates = cohort.send(opening, CompositionalUpdate)  # lines 4-16
            losses = None if isinstance(updates, Sums) else updates.first
        else:
            at_shared_model = cohort.send(opening, LossAtSharedModel)
            losses, f = at_shared_model.loss, at_shared_model.loss[at_shared_model.present, 0]
            self._refuse(cohort, losses)
            shift = f.max() if s.scale == "largest" else composed_loss(f, s.gamma)
            updates = cohort.send(LossShift(shift[None]), CompositionalUpdate)
        self._refuse_left(cohort, updates)
        self.state["theta"] = self.state["theta"] + updates.mean(updates.delta_theta)  # line 17
        statistics = base.statistics_of(updates)
        if losses is None:  # only their sums are known
            return statistics
        f = losses[updates.present, 0]
        r = optimal_weights(f, s.gamma)
        clients = [id for id, is_present in zip(cohort.clients, updates.present.tolist(), strict=True) if is_present]
        return statistics | {
            # Lemma 1 at the shared model; 1/Σ r² is the number of equally weighted clients with the same concentration.
            "objective": float(composed_loss(f, s.gamma)),
            "r_largest": float(r.max()),
            "r_smallest": float(r.min()),
            "effective_clients": float(1 / r.square().sum()),
            **{f"r.{client}": weight for client, weight in zip(clients, r.tolist(), strict=True)},
        }

    def _refuse_left(self, cohort: Cohort, updates: Replies[CompositionalUpdate]) -> None:
        """Raise if a client left the finite range in its steps; the error names it unless only sums are known."""
        if not isinstance(updates, Sums):
            self._refuse(cohort, updates.left_loss, updates.left)
        elif not updates.is_noisy and updates.total(updates.left):  # noise hides a client that left: its update is 0
            s = self.settings
            raise FloatingPointError(
                f"a client became infinite or NaN, with γ = {s.gamma:g} and scale: {s.scale}; set a smaller local.lr "
                f"(now {s.local.lr:g}), or a larger gamma"
            )

    def _refuse(self, cohort: Cohort, losses: Tensor, failed_step: Tensor | None = None) -> None:
        """Raise if a client left the finite range: at the shared model, or at step ``failed_step`` if nonzero."""
        s = self.settings
        for i, client in enumerate(cohort.clients):
            if losses[i] >= NOT_FINITE if failed_step is None else failed_step[i] > 0:
                place = "the shared model" if failed_step is None else f"local step {int(failed_step[i])}"
                loss = f"{float(losses[i]):.4g}" if losses[i] < NOT_FINITE else "not finite"
                others = "scale: largest or normalized, " if s.scale == "literal" else ""
                raise FloatingPointError(
                    f"{client} became infinite or NaN at {place}, with f = {loss}, γ = {s.gamma:g} and scale: "
                    f"{s.scale};"
                    f" set {others}a smaller local.lr (now {s.local.lr:g}), or a larger gamma"
                )


# --- the clients ------------------------------------------------------------------------------------------------------


class ComFedLClient(base.ClientAlgorithm):
    """Client of ComFedL, which makes local steps on the composition."""

    predictors = ("personal", "global")

    @conversation
    def train(self, clients: ClientGroup, opening: SharedModel) -> Conversation:
        """Perform Algorithm 1, lines 5-16."""
        theta = opening.theta.expand(len(clients), -1)
        shift, sent_loss = torch.zeros(1, dtype=torch.float64, device=theta.device), None
        if self.settings.scale != "literal":
            shared_loss = loss_at_shared_model(self.setup.model, theta, clients, self.settings)
            received: LossShift = yield LossAtSharedModel(shared_loss)
            shift, sent_loss = received.shift, shared_loss if self.settings.holds else None
        yield compositional_sgd(self.setup.model, theta, clients, self.settings, shift, sent_loss)
        return None

    @conversation
    def personalize(self, clients: ClientGroup, opening: PersonalizeRequest) -> Predictors:
        """Return ``global``, the shared model, and ``personal``, adapted from it by ``adapt_steps`` steps of SGD."""
        model, shared = self.setup.model, opening.theta.expand(len(clients), -1)

        def adapted() -> dict[str, Tensor]:
            key = "inner_lr" if self.settings.objective == "damaml" else "local.lr"
            theta = adapt(model, clients, shared, self.settings.adaptation, purpose="adapt", key=key)
            return {"personal": theta, "global": shared}

        return or_shared_alone(model, clients, shared, adapted)


def compose_loss(
    local: LocalTrainer, s: ComFedLSettings, w: Parameters, batch: Sequence[Batch], outer: Sequence[Batch]
) -> Tensor:
    """Return ℓ^i(f^i(w)), the loss whose exponential g^i takes, for each client: ``[g]`` (lines 9 and 11).

    Robust averaging (eq. 6) uses f_B(w), without a second batch, because g is not an expectation. ComFedL-DAMAML
    (eq. 10) uses f_B̃(w - η∇f_B(w)), whose inner derivative is I - η∇²f_B(w), or I to first order. With gradients
    disabled, the models are in evaluation mode.
    """
    value = local.value if torch.is_grad_enabled() else local.measured
    if s.objective == "robust":
        return value(w, *batch)
    slope, _ = local.gradient(w, *batch, differentiable=torch.is_grad_enabled() and not s.first_order)
    adapted = {name: laid_out(part - s.inner_lr * d, part) for (name, part), d in zip(w.items(), slope, strict=True)}
    return value(Parameters(adapted, w.buffers), *outer)


def loss_at_shared_model(model: FlatModel, theta: Tensor, clients: ClientGroup, s: ComFedLSettings) -> Tensor:
    """Return ℓ^i(f^i(w)) at the shared model, θ ``[g, d] -> [g, 1]`` float64."""
    local = LocalTrainer(model, clients, mask_absent=s.local.mask_absent)
    if s.losses_on == "all":
        batch = outer = local.everything()
    else:
        batches = paired_batches(local, s, [1] * len(clients), "loss", "loss-outer", augmented=False)
        batch, outer = ([pair] for pair in next(batches))
    with torch.no_grad():
        return reported(compose_loss(local, s, local.parameters(theta), batch, outer))[:, None]


def paired_batches(
    local: LocalTrainer,
    s: ComFedLSettings,
    counts: Sequence[int],
    *purposes: str,
    augmented: bool = True,
    skip: int = 0,
) -> Iterator[tuple[Batch, Batch]]:
    """Return the batches B and B̃ of each step (lines 8 and 10); B twice if there is no second batch."""
    batches = local.batches(s.local.batch_size, counts, purposes[0], augmented=augmented, skip=skip)
    if s.objective == "robust":
        return ((batch, batch) for batch in batches)
    outer_size = s.local.outer_batch_size or s.local.batch_size
    outer = local.batches(outer_size, counts, purposes[1], augmented=augmented, skip=skip)
    return zip(batches, outer, strict=True)


def compositional_sgd(
    model: FlatModel,
    theta: Tensor,
    clients: ClientGroup,
    s: ComFedLSettings,
    shift: Tensor,
    sent_loss: Tensor | None = None,
) -> CompositionalUpdate:
    """Train one model per client on g^i(f^i(w)) (papers/002, Algorithm 1, lines 6-14).

    Parameters
    ----------
    theta
        ``[g, d]``, the starting point of each client.
    shift
        ``[1]`` float64, see :meth:`ComFedLSettings.factor`.
    sent_loss
        ``[g, 1]``, losses whose factors are held over the steps; None to use the losses of each step's batch.
    """
    local = LocalTrainer(model, clients, mask_absent=s.local.mask_absent)
    w = local.parameters(theta)  # line 6
    leaves, decay = list(w.values()), 2 * s.local.lambda_theta
    step, counts = local.sgd(leaves, s.local, decay=False), [s.local.count(n) for n in local.sizes]
    steps = torch.tensor(counts, device=theta.device)
    failed_step, left_loss = (
        torch.zeros_like(steps),
        torch.zeros(len(clients), dtype=torch.float64, device=theta.device),
    )
    losses: list[Tensor] = []
    state = LoopState(w, tensors=[failed_step, left_loss], histories=[losses], optimizers=[step])

    def draw(skip: int) -> Iterator[tuple[Batch, Batch]]:
        return paired_batches(local, s, counts, "train", "outer", skip=skip)

    for batch, outer in local.continued(draw, state, counts):
        loss = compose_loss(local, s, w, [batch], [outer])  # lines 9-11
        slope = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
        loss = loss.detach()
        factor = s.factor(loss if sent_loss is None else sent_loss[:, 0].to(loss.dtype), shift)
        with torch.no_grad():
            u = local.scaled(list(slope), factor)  # line 12
            u = [part + decay * leaf for part, leaf in zip(u, leaves, strict=True)] if decay else u
        t = len(losses)
        losses.append(reported(loss))
        going = (t < steps) & (failed_step == 0)
        finite = loss.isfinite() & factor.isfinite()
        failed_step.copy_(torch.where(going & ~finite, t + 1, failed_step))
        left_loss.copy_(torch.where(failed_step == t + 1, losses[t], left_loss))
        step(u, going & finite)  # line 13
    change = local.join(w) - theta
    diverged = ~change.isfinite().all(1) & (failed_step == 0)
    failed_step, left_loss = torch.where(diverged, steps, failed_step), torch.where(diverged, losses[-1], left_loss)
    stayed = failed_step == 0
    mean = mean_loss([torch.where(stayed, loss, 0) for loss in losses], counts)
    columns = [column.double()[:, None] for column in (steps, mean, losses[0], failed_step, left_loss)]
    return CompositionalUpdate(torch.where(stayed[:, None], change, 0), *columns)


def reported(loss: Tensor) -> Tensor:
    """Clamp a loss to a finite value: a client with a nonfinite reply would silently be left out of the round."""
    return loss.double().nan_to_num(nan=NOT_FINITE).clamp(max=NOT_FINITE)


# --- settings ---------------------------------------------------------------------------------------------------------


class LocalSteps(LocalSGD):
    """Settings of lines 7-14 of Algorithm 1. λ_θ, momentum and clipping, which the paper lacks, act on u, outside g."""

    steps: int | None = Field(default=5, ge=1, description="τ, the synchronization gap; null if epochs is set")
    lr: float = Field(default=0.01, gt=0, description="learning rate η")
    momentum: float | None = Field(
        default=0.0, ge=0, lt=1, description="momentum of sgd, fresh at every visit; the paper has none"
    )
    outer_batch_size: int | None = Field(
        default=None, ge=1, description="b₁, the size of the second batch (damaml); null is batch_size"
    )


class ComFedLSettings(Settings):
    """Keys of ``algorithm`` for ComFedL."""

    objective: Literal["robust", "damaml"] = Field(
        default="robust", description="robust averaging (eq. 6), or DAMAML (eq. 10)"
    )
    gamma: float = Field(default=0.2, gt=0, description="γ; smaller values give the largest loss more weight")
    scale: Literal["literal", "largest", "normalized"] = Field(
        default="normalized",
        description=(
            "factor on a client's gradient: exp(f/γ)/γ; the same divided by the exponential of the largest loss; or "
            "normalized, so that the mean is the gradient of eq. 5"
        ),
    )
    factor_at: Literal["step", "round"] | None = Field(
        default=None,
        description=(
            "step: from each local step's batch (line 11); round: from the loss at the shared model, constant over "
            "the steps; null: step for literal, round for the others"
        ),
    )
    losses_on: Literal["all", "batch"] = Field(default="all", description="train data for the loss at the shared model")
    local: LocalSteps = Field(default=LocalSteps(), description="local training in a round")
    inner_lr: float = Field(
        default=0.05, gt=0, description="η in w - η∇f(w) of eq. 10 (damaml), also for personalization"
    )
    first_order: bool = Field(
        default=False, description="damaml: approximate the derivative of w - η∇f(w) by the identity"
    )
    adapt_steps: int | None = Field(
        default=None, ge=0, description="SGD steps from the shared model to personal; null: 1 for damaml, 0 for robust"
    )

    @model_validator(mode="after")
    def _fit_the_objective(self) -> Self:
        if self.scale == "literal" and self.factor_at == "round":
            raise ValueError(
                "factor_at: round needs a loss before training, which scale: literal does not request; set it to step, "
                "or scale to largest or normalized"
            )
        if self.objective == "robust" and self.first_order:
            raise ValueError("first_order: true needs objective: damaml (got robust)")
        if self.objective == "robust" and self.local.outer_batch_size is not None:
            raise ValueError(
                f"local.outer_batch_size: objective: robust has no second batch; set it to null (got "
                f"{self.local.outer_batch_size}), or objective to damaml"
            )
        check_one_batch(self.local, "∇g is not linear in the batch")
        return self

    @property
    def holds(self) -> bool:
        """True if a client's factor is held over the steps of a round."""
        return self.factor_at == "round" if self.factor_at is not None else self.scale != "literal"

    @property
    def adaptation(self) -> LocalSGD:
        """SGD from the shared model to ``personal`` (damaml: the inner step of eq. 10)."""
        damaml, local = self.objective == "damaml", self.local
        steps = int(damaml) if self.adapt_steps is None else self.adapt_steps
        plain = local.plain(self.inner_lr) if damaml else local
        return plain.with_steps(steps=steps)

    def factor(self, loss: Tensor, shift: Tensor) -> Tensor:
        """Return ∇g at a client's loss f ``[g]``, up to the divisor of ``scale`` (papers/002, below eq. 6; line 11).

        This is exp((f - shift)/γ) ``[g]``, divided by γ unless the scale is ``normalized``; it is infinite if the
        loss's dtype cannot hold it. ``shift`` ``[1]`` float64 is 0 (literal), the largest loss, or
        :func:`composed_loss` (normalized).
        """
        exponential = ((loss.double() - shift) / self.gamma).exp()
        return (exponential if self.scale == "normalized" else exponential / self.gamma).to(loss.dtype)


# --- messages ---------------------------------------------------------------------------------------------------------


class LossAtSharedModel(Message):
    """Client's loss at the shared model, before any step; the literal form does not use it."""

    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64


class LossShift(Message):
    """Value subtracted from losses before their exponential is taken; the literal form does not use it."""

    shift: Tensor = broadcast(Quantity.OTHER)  # [1] float64


class CompositionalUpdate(Update):
    """Update w_τ - w̄ (Algorithm 1, line 15), zero if the finite range was left, with statistics of the training."""

    first: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64, of the first step's batch at the shared model
    left: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64, step (1 ... τ) at which the finite range was left, or 0
    left_loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64, the loss at that step


class ComFedL(base.Algorithm):
    """Compositional federated learning."""

    name = "comfedl"
    settings = ComFedLSettings
    example = {"objective": "damaml", "gamma": 0.5, "local": {"steps": None, "epochs": 1, "batch_size": 4, "lr": 0.05}}
    server = ComFedLServer
    client = ComFedLClient
    messages = (SharedModel, LossAtSharedModel, LossShift, CompositionalUpdate, PersonalizeRequest)
    predictors = {"personal": "ComFedL", "global": "ComFedL, shared model"}
    no_example_privacy = "Clients scale their gradients by exponentials of losses, which have no noise."

    def sums(self, settings: Any) -> SummedFields:
        """Return the sum of the updates; losses at the shared model are separate answers."""
        return sums_of(CompositionalUpdate, excluded=("first", "left_loss"))

    def noisy_sums_suffice(self, settings: ComFedLSettings) -> str | None:
        """Return the reason unless the scale needs no losses."""
        if settings.scale == "literal":
            return None
        return f"weights updates by losses that clients send without noise (scale: {settings.scale}); set literal"

    def differentiates_twice(self, settings: ComFedLSettings) -> bool:
        """Return True for DAMAML, unless to first order."""
        return settings.objective == "damaml" and not settings.first_order


COMFEDL = ComFedL()
