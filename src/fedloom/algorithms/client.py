"""Training on clients, the only module that distinguishes one client from a group of several.

The model of one client is a dict of leaves. A group has up to ``runtime.clients_at_once`` clients, and every leaf has a
first axis for them. Elementwise functions on lists of leaves serve both.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithms.batches import TrainBatches
from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD, LocalStep, first_rows
from fedloom.algorithms.losses import clipped_sums, stacked_losses
from fedloom.algorithms.progress import LoopState
from fedloom.models.flat import FlatModel, Leaves, masked
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.privacy.gaussian_mechanism import on_grid

_is_missing = partial(operator.is_, None)

Parameters: TypeAlias = Leaves
"""Parameters w of g clients: named leaves, ``[*shape]`` if g is 1, else ``[g, *shape]``, with their buffers."""

Change: TypeAlias = Callable[[list[Tensor], list[Tensor], list[Tensor], Mapping[str, list[Tensor]]], list[Tensor]]
"""Elementwise function ``(gradients, w, start, given) -> gradients`` of lists of leaves."""


@dataclass(frozen=True, eq=False)
class Correction:
    """Change of the gradients of every step, before λ_θ, clipping and the optimizer, like a term of the loss.

    ``given`` has vectors ``[g, d]`` for ``change``, which receives them as lists of leaves.
    """

    change: Change
    given: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Trained:
    """Result of local training."""

    theta: Tensor  # [g, d]
    steps: Tensor  # [g, 1] float64, SGD steps made
    loss: Tensor  # [g, 1] float64, mean training loss over them, each before its update
    also: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # fields of the answer by name, which add to the usual ones or replace them

    def mapped(self, rows: Callable[[Tensor], Tensor]) -> Trained:
        """Apply a function of rows of clients to all of them."""
        return Trained(rows(self.theta), rows(self.steps), rows(self.loss))

    def part(self, theta: Tensor) -> Trained:
        """Return the same with a part of θ, ``[g, s]``."""
        return Trained(theta, self.steps, self.loss)

    @classmethod
    def joined(cls, parts: Sequence[Trained]) -> Trained:
        """Return the results of several groups of clients as one."""
        theta, steps, loss = (torch.cat([getattr(part, name) for part in parts]) for name in ("theta", "steps", "loss"))
        return cls(theta, steps, loss)


@dataclass(frozen=True)
class LongestFirst:
    """Order of clients by numbers of steps, most first, so that clients that are done are the last rows of tensors.

    Attributes
    ----------
    order
        Positions of the clients.
    counts
        Their numbers of steps, in this order.
    """

    order: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[int]) -> LongestFirst:
        """Return the order of clients with these numbers of steps."""
        order = sorted(range(len(counts)), key=lambda j: -counts[j])
        return cls(tuple(order), tuple(counts[j] for j in order))

    def rows(self, values: Tensor) -> Tensor:
        """Return rows of clients in this order; without a copy if they are in it."""
        return _rows(values, self.order)

    def back(self, values: Tensor) -> Tensor:
        """Return rows to their original order, the inverse of :meth:`rows`."""
        return _rows(values, sorted(range(len(self.order)), key=self.order.__getitem__))


class LocalTrainer(TrainBatches):
    """Losses f_i of g clients, each at its own parameters w_i, and the gradients of these losses.

    Gradients, and losses to differentiate, use the model in training mode; :meth:`measured` uses it in evaluation mode.

    Parameters and errors are those of :class:`TrainBatches`. A group that fails at its opening, such as by batches of
    different lengths, is served one by one.

    Parameters
    ----------
    mask_absent
        Set the logits of labels absent from a client's train split to -inf.
    at_home
        True for training whose results stay with the clients. Gradients of other training in a round are noisy if the
        run protects examples, and the losses returned with them are 0.
    """

    def __init__(
        self,
        model: FlatModel,
        group: ClientGroup,
        *,
        mask_absent: bool = False,
        members: Sequence[int] | None = None,
        at_home: bool | None = None,
    ) -> None:
        super().__init__(model.in_training(), group, members=members, at_home=at_home)
        if mask_absent:
            self._refuse_if_private("a mask of absent labels")
        clients = [group.clients[i] for i in self.members]
        self._absent = torch.stack([~client.present for client in clients]).to(self._device) if mask_absent else None
        self._model, self._measured = self._masked(self._model), self._masked(model)
        self._layout = model.layout

    def _masked(self, model: FlatModel) -> FlatModel:
        """Mask the labels absent from a single client; several clients mask their own in :meth:`_value`."""
        return model if self._absent is None or self.stacked else masked(model, self._absent[0])

    # Parameters

    def parameters(self, theta: Tensor) -> Parameters:
        """Return θ ``[g, d]`` as separate leaves that require gradients, and its buffers."""
        if not self.stacked:
            return self._layout.divided(self._layout.leaves(theta[0], requires_grad=True))
        parts = torch.split(theta.detach(), self._layout.sizes, dim=1)
        return self._layout.divided(
            {
                name: part.reshape(len(part), *shape).clone().requires_grad_(name not in self._layout.buffers)
                for (name, shape), part in zip(self._layout.entries, parts, strict=True)
            }
        )

    def join(self, w: Mapping[str, Tensor]) -> Tensor:
        """Join leaves and buffers into ``[g, d]``, the inverse of :meth:`parameters`."""
        if not self.stacked:
            return self._layout.join(w).detach()[None]
        return torch.cat([w[name].reshape(len(self.members), -1) for name, _ in self._layout.entries], 1).detach()

    def join_gradients(self, w: Parameters, gradients: Sequence[Tensor]) -> Tensor:
        """Join the gradients of all leaves of w into ``[g, d]``, with zeros for its buffers."""
        zeros = {name: torch.zeros_like(b) for name, b in w.buffers.items()}
        return self.join(Leaves(dict(zip(w, gradients, strict=True)), zeros))

    def first(self, w: Parameters, k: int) -> Parameters:
        """Return views of the leaves and buffers of the first k clients; steps of either change both."""
        if not self.stacked or k == len(self.members):
            return w
        leaves = {name: leaf.detach()[:k].requires_grad_() for name, leaf in w.items()}
        return Leaves(leaves, {name: buffer[:k] for name, buffer in w.buffers.items()})

    def going(self, batch: Batch) -> int:
        """Return the number of clients that still step on a shrinking batch; they are the first rows."""
        return len(batch.weight) if self.stacked else 1

    def padded(self, loss: Tensor) -> Tensor:
        """Return losses of the first k clients as ``[g]``, with zeros for those that are done."""
        missing = len(self.members) - len(loss)
        return F.pad(loss, (0, missing)) if missing else loss

    def each(self, values: Tensor, like: Tensor) -> Tensor:
        """Reshape one number per client ``[g]`` to broadcast against a leaf."""
        return values.view(-1, *[1] * (like.dim() - 1)) if self.stacked else values[0]

    def scaled(self, values: list[Tensor], by: Tensor) -> list[Tensor]:
        """Multiply leaves by one number per client ``[g]``."""
        if not self.stacked:
            return list(torch._foreach_mul(values, by[0]))
        return [self.each(by, value) * value for value in values]

    # Losses

    def value(self, w: Parameters, *pieces: Batch) -> Tensor:
        """Return f_i(w_i) over the examples of some pieces, ``[g]``, in training mode, twice differentiable.

        Like any call in training mode, it moves the buffers of w in place.
        """
        self._refuse_if_private("a loss")
        parts = []
        for piece in pieces:
            with self.drawing(piece.seed):
                parts.append(self._value(self._model, w, piece))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    @torch.no_grad()
    def measured(self, w: Parameters, *pieces: Batch) -> Tensor:
        """Return f_i(w_i) over the examples of some pieces, ``[g]``, in evaluation mode, without gradients."""
        self._refuse_if_private("a loss")
        parts = [self._value(self._measured, w, piece) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _value(self, model: FlatModel, w: Parameters, p: Batch) -> Tensor:
        if not self.stacked:
            return (model.loss(w, p.x, p.y) * model.batch_weights(p.y, p.weight)).sum(0, keepdim=True)
        before = {} if p.active is None else {name: b.clone() for name, b in w.buffers.items()}
        absent = None if self._absent is None else self._absent[: len(p.weight)]
        losses = stacked_losses(model, w, p.x, p.y, p.weight, absent)
        for name, was in before.items():  # a client that is done keeps its buffers
            assert p.active is not None
            w.buffers[name] = torch.where(self.each(p.active, was), w.buffers[name], was)
        return losses

    def gradient(
        self,
        w: Parameters,
        *pieces: Batch,
        of: list[Tensor] | None = None,
        differentiable: bool = False,
        at_home: bool = False,
    ) -> tuple[list[Tensor], Tensor]:
        """Return ∇f_i(w_i) over the examples of some pieces, and f_i(w_i) ``[g]``.

        The gradient is with respect to the leaves ``of``, in their order, by default all of them. It is zero for a leaf
        that the model does not use. With ``differentiable`` it can itself be differentiated (for MAML).

        If steps are noisy, these are the results of :meth:`noisy_gradient`, whose losses are 0, except for a gradient
        that is only used ``at_home``.
        """
        leaves = list(w.values()) if of is None else of
        if self.private is not None and not at_home:
            if differentiable or len(pieces) != 1:
                self._refuse_if_private("a second derivative, or a gradient over several batches,")
            return self.noisy_gradient(self.private, w, pieces[0], leaves)
        if not at_home and any(piece.each is not None for piece in pieces):
            raise RuntimeError("a batch drawn for a noisy step belongs to a trainer whose steps are noisy")
        return self._exact_gradient(w, pieces, leaves, differentiable=differentiable)

    def _exact_gradient(
        self, w: Parameters, pieces: Sequence[Batch], leaves: list[Tensor], *, differentiable: bool
    ) -> tuple[list[Tensor], Tensor]:
        gradients: list[Tensor] = []
        total = None
        for piece in pieces:
            with torch.enable_grad(), self.drawing(piece.seed):
                loss = self._value(self._model, w, piece)
                total_loss = loss.sum() if self.stacked else loss
                part = torch.autograd.grad(total_loss, leaves, create_graph=differentiable, allow_unused=True)
            if any(map(_is_missing, part)):
                part = tuple(torch.zeros_like(w) if p is None else p for p, w in zip(part, leaves, strict=True))
            gradients = [a + b for a, b in zip(gradients, part, strict=True)] if gradients else list(part)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return gradients, total

    def noisy_gradient(
        self, private: ExamplePrivacy, w: Parameters, batch: Batch, leaves: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Return (Σ_j clipped g_j + N(0, z²C² I)) / b for each client, 0 for one that is done, and losses ``[g]`` of 0.

        Abadi et al. 2016, arXiv 1607.00133, Algorithm 1. g_j is the gradient of an example's loss with respect to these
        leaves, and b the expected size of a batch: the actual one would disclose how many examples were drawn.
        """
        if batch.each is None:
            raise RuntimeError("the batch was not drawn for a noisy step")
        place = {id(leaf): name for name, leaf in w.items()}
        names = [place[id(leaf)] for leaf in leaves]
        with self.drawing(batch.seed):
            probe = self.group.probe
            sums = clipped_sums(self._model, w, names, batch, private.clip, stacked=self.stacked, probe=probe)
        rows = [[one[j] for one in sums] for j in range(len(batch.each))] if self.stacked else [sums]
        means = [self._noisy_mean(private, j, row, batch) for j, row in enumerate(rows)]
        if probe is not None:
            probe.released(batch, means[0])
        parts = torch.split(torch.stack(means), [one.numel() for one in rows[0]], dim=1)
        found = [laid_out(part.reshape(leaf.shape).to(leaf), leaf) for part, leaf in zip(parts, leaves, strict=True)]
        return found, batch.weight.new_zeros(len(rows))

    def _noisy_mean(self, private: ExamplePrivacy, j: int, sums: Sequence[Tensor], batch: Batch) -> Tensor:
        """Return the j-th client's sums over a batch with noise, times the weight of an example, ``[d]`` float64."""
        assert batch.each is not None
        total = torch.cat([one.reshape(-1) for one in sums]).double().cpu()
        if batch.active is not None and not batch.active[j]:
            return torch.zeros_like(total)
        noise = self.group.noise_for(self.members[j], total)
        return on_grid(total + private.deviation * noise, private.deviation) * float(batch.each[j])

    def gradient_at(self, theta: Tensor, *pieces: Batch) -> tuple[Tensor, Tensor]:
        """Return ∇f_i at θ_i as flat vectors, ``[g, d] -> [g, d]``, and f_i(θ_i) ``[g]``."""
        w = self.parameters(theta)
        gradients, loss = self.gradient(w, *pieces)
        return self.join_gradients(w, gradients), loss

    # Steps

    def sgd(self, w: list[Tensor], s: LocalSGD, *, decay: bool = True) -> LocalStep:
        """Return the step of active clients, at the rate of the round."""
        return LocalStep(w, s, s.rate(self.group.round), stacked=self.stacked, decay=decay)

    def trained(
        self, theta: Tensor, losses: list[Tensor], counts: Sequence[int], key: str, lr: float, also: str = ""
    ) -> Trained:
        """Return the result of training: θ ``[g, d]`` after ``counts`` steps, with ``losses`` ``[g]`` before each step.

        A client whose training diverged is lost. Its reason names the step and the ``key`` to lower, now ``lr``;
        ``also`` names another remedy.
        """
        history = torch.stack(losses).cpu()
        finite_rows = theta.sum(1).isfinite()  # a quarter of the work; a sum may overflow although all are finite
        if not finite_rows.all():
            finite_rows = theta.isfinite().all(1)
        for j, (count, finite) in enumerate(zip(counts, finite_rows.tolist(), strict=True)):
            bad = [t for t, loss in enumerate(history[:count, j].tolist(), start=1) if not math.isfinite(loss)]
            if bad or not finite:
                before = "smaller steps earlier, because its loss was not finite at the start" if bad[:1] == [1] else ""
                other = also or before
                self.group.fail_client(
                    self.members[j],
                    f"training diverged at local step {bad[0] if bad else count} of {count}; "
                    f"lower algorithm.{key} (now {lr:g})" + (f", or try {other}" if other else ""),
                )
        return Trained(theta, torch.tensor(counts).double()[:, None], mean_loss(losses, counts)[:, None])


def mean_loss(losses: list[Tensor], counts: Sequence[int]) -> Tensor:
    """Return the mean loss over each client's own steps: ``[g]`` float64, on the CPU, from ``[g]`` for each step."""
    history, number = torch.stack(losses).cpu().double(), torch.tensor(counts)
    made = torch.arange(len(history))[:, None] < number
    return torch.where(made, history, 0).cumsum(0)[-1] / number  # cumsum adds sequentially


def train(
    model: FlatModel,
    group: ClientGroup,
    theta: Tensor,
    s: LocalSGD,
    *,
    correct: Correction | None = None,
    only: Literal["all", "body", "head"] | Container[str] = "all",
    counts: Sequence[int] | None = None,
    members: Sequence[int] | None = None,
    purpose: str = "train",
    key: str = "local.lr",
    at_home: bool | None = None,
) -> Trained:
    """Train one model per client by mini-batch steps of ``s.optimizer`` on the mean loss + λ_θ‖θ‖².

    A client whose training diverges is lost, and its answer names the step (:meth:`ClientGroup.fail_client`).

    Parameters
    ----------
    theta
        ``[g, d]``, the starting point of each client.
    correct
        Changes the gradients at every step.
    only
        Part to train, or the names of its entries; the rest of θ stays bitwise unchanged. Buffers move with the body.
    counts
        Steps of each client; by default from the settings.
    members
        Positions of the g clients in the group; all of them by default.
    purpose
        Purpose of the generators that draw the batches.
    key
        Key of the learning rate under ``algorithm``, for messages.
    at_home
        True if the result stays with the clients; None: outside of training rounds (:class:`LocalTrainer`).
    """
    members = range(len(group)) if members is None else members
    steps = [s.count(len(group.clients[i].train)) for i in members] if counts is None else counts
    ordered = LongestFirst.of(steps)
    counts, theta = ordered.counts, ordered.rows(theta)
    who = [members[j] for j in ordered.order]
    local = LocalTrainer(model, group, mask_absent=s.mask_absent, members=who, at_home=at_home)
    w = local.parameters(theta)
    parts: dict[object, Container[str]] = {"all": w, "body": model.layout.body, "head": model.layout.head}
    chosen = parts[only] if isinstance(only, str) else only
    names = [name for name in w if name in chosen]
    leaves, start = [w[name] for name in names], {name: b.clone() for name, b in w.buffers.items() if only == "head"}
    changed = _corrected(local, correct, names, leaves, ordered)
    step, losses = local.sgd(leaves, s), list[Tensor]()
    last = partial(LocalTrainer, model, group, mask_absent=s.mask_absent, members=who[:1], at_home=at_home)
    state = LoopState(w, histories=[losses], optimizers=[step])
    batches = local.steps(s, counts, purpose, state, shrinking=local.stacked)
    for gradients, loss in _gradients(local, w, names, batches, last):
        losses.append(local.padded(loss))
        step(changed(gradients), None)
        del gradients  # free them before the next ones are computed: they take as much memory as the model
    del step, changed, state, batches  # and the optimizer's state
    w.buffers |= start
    return local.trained(local.join(w), losses, counts, key, s.lr).mapped(ordered.back)


def adapt(
    model: FlatModel, group: ClientGroup, theta: Tensor, s: LocalSGD, members: list[int] | None = None, **how: Any
) -> Tensor:
    """Return θ ``[g, d]`` of a group after local steps (:func:`train`) of some members, by default of all.

    Rows without steps stay bitwise unchanged.
    """
    if members == [] or not (s.steps or s.epochs):
        return theta
    how = {"purpose": "fine-tune", **how}
    if members is None:
        return train(model, group, theta, s, **how).theta
    theta = theta.clone()
    theta[members] = train(model, group, theta[members], s, members=members, **how).theta
    return theta


def _gradients(
    local: LocalTrainer,
    w: Parameters,
    names: Sequence[str],
    steps: Iterable[Sequence[Batch]],
    last: Callable[[], LocalTrainer],
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield the gradients and losses of each step, for the clients that are not done, which are the first of a stack.

    The last remaining client uses its own trainer, ``last()``, whose step takes a fifth less time than a stack of one.
    """
    k, of, by = len(local.members), [w[name] for name in names], local
    for pieces in steps:
        if local.stacked and local.going(pieces[0]) < k:
            k = local.going(pieces[0])
            w = local.first(w, k)
            if k == 1:
                by, leaves = last(), {name: leaf.detach()[0].requires_grad_() for name, leaf in w.items()}
                w = Leaves(leaves, {name: buffer[0] for name, buffer in w.buffers.items()})
            of = [w[name] for name in names]
        if by is local:
            yield by.gradient(w, *pieces, of=of)
        else:
            yield _as_stack(*by.gradient(w, *(piece.of_first for piece in pieces), of=of))


def _as_stack(gradients: list[Tensor], loss: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of one client as those of a stack."""
    return [gradient[None] for gradient in gradients], loss


def _rows(values: Tensor, order: Sequence[int]) -> Tensor:
    """Return rows in an order; without a copy if they are in it."""
    return values if all(i == j for i, j in enumerate(order)) else values[list(order)]


def _corrected(
    local: LocalTrainer, correct: Correction | None, names: Sequence[str], leaves: list[Tensor], ordered: LongestFirst
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return ``gradients -> gradients`` by a correction at the current leaves, of the first clients in this order."""
    if correct is None:
        return lambda gradients: gradients
    start = [leaf.detach().clone() for leaf in leaves]
    vectors = {name: local.parameters(ordered.rows(vector)) for name, vector in correct.given.items()}
    given = {name: [parts[leaf].detach() for leaf in names] for name, parts in vectors.items()}
    change = torch.no_grad()(correct.change)

    def changed(gradients: list[Tensor]) -> list[Tensor]:
        some = {name: first_rows(values, gradients) for name, values in given.items()}
        return change(gradients, first_rows(leaves, gradients), first_rows(start, gradients), some)

    return changed


def laid_out(values: Tensor, like: Tensor) -> Tensor:
    """Return ``values`` in the memory layout of a leaf, differentiably.

    A tensor computed from a convolution kernel with one input channel loses the channels-last layout, and convolutions
    with it take half as long again on a CPU.
    """
    return values if values.stride() == like.stride() else torch.empty_like(like).copy_(values)


def proximal(strength: float, to: Tensor | None = None) -> Correction:
    """Return a correction that adds ∇ strength/2 ‖w - w̄‖², w̄ being the start or the vectors ``to`` ``[g, d]``."""

    def change(
        gradients: list[Tensor], w: list[Tensor], start: list[Tensor], given: Mapping[str, list[Tensor]]
    ) -> list[Tensor]:
        centre = given.get("to", start)
        return list(torch._foreach_add(gradients, torch._foreach_sub(w, centre), alpha=strength))

    return Correction(change, {} if to is None else {"to": to})
