"""Per-FedAvg: a shared model that performs well after one step of SGD on a client's data (MAML).

A. Fallah, A. Mokhtari, A. Ozdaglar, Personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach, NeurIPS 2020, arXiv 2002.07948, Algorithm 1. Clients minimize F_i(w) = f_i(w - α∇f_i(w)) by
SGD, whose gradient is (I - α∇²f_i(w)) ∇f_i(w - α∇f_i(w)), each of its three parts on a separate batch (§5: first
order omits the Hessian, HF approximates its product with a vector by a finite difference). Line numbers refer to
docs/algorithms/per-fedavg.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms.client import LocalTrainer, LongestFirst, Parameters, Trained, laid_out
from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.fedavg import Averaging, FedAvg
from fedloom.algorithms.local_sgd import LocalSGD, check_one_batch
from fedloom.algorithms.progress import LoopState
from fedloom.core.settings import Settings
from fedloom.models.flat import FlatModel


def meta_gradient(
    local: LocalTrainer, w: Parameters, s: MetaLearning, inner: Batch, outer: Batch, third: Batch | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return ∇F_i(w_i), to first order if there is no third batch, and F_i(w_i) ``[g]``."""
    slope, _ = local.gradient(w, inner)
    q, loss = local.gradient(along(w, slope, -s.inner_lr), outer)  # lines 4-5
    if third is not None:
        q = list(torch._foreach_add(q, hessian_product(local, w, q, third, s.step), alpha=-s.inner_lr))  # line 6
    return q, loss


def hessian_product(
    local: LocalTrainer, w: Parameters, q: list[Tensor], batch: Batch, delta: float | None
) -> list[Tensor]:
    """Return ∇²f_i(w_i) q: (∇f_i(w_i + δq) - ∇f_i(w_i - δq)) / 2δ, or exactly if δ is None."""
    if delta is not None:
        ahead, behind = (local.gradient(along(w, q, step), batch)[0] for step in (delta, -delta))
        return list(torch._foreach_div(torch._foreach_sub(ahead, behind), 2 * delta))
    slope, _ = local.gradient(w, batch, differentiable=True)
    with torch.enable_grad():
        product = torch.stack([(a * b).sum() for a, b in zip(slope, q, strict=True)]).sum()
    return list(torch.autograd.grad(product, list(w.values()), materialize_grads=True))


def along(w: Parameters, direction: list[Tensor], step: float) -> Parameters:
    """Return the parameters w + by · direction, with the buffers of w."""
    with torch.no_grad():
        values = torch._foreach_add(list(w.values()), torch._foreach_mul(direction, step))
        ahead = {
            name: laid_out(value, leaf).requires_grad_() for (name, leaf), value in zip(w.items(), values, strict=True)
        }
        return Parameters(ahead, w.buffers)


class MetaLearning(Settings):
    """Keys of methods whose clients train F_i; ``local.lr`` is the paper's β."""

    local: LocalSGD = Field(
        default=LocalSGD(epochs=1), description="SGD on F_i; epochs count one of the batches of a step"
    )
    personalize_steps: int = Field(
        default=1, ge=0, description="SGD steps at rate inner_lr from the shared model to personal"
    )
    inner_lr: float = Field(
        default=0.01, ge=0, description="α, rate of the inner step and of personalization; 0 is FedAvg"
    )
    hessian: Literal["none", "finite_difference", "exact"] = Field(
        default="none",
        description="∇²f(w) q in the gradient: left out (first order), by a finite difference (HF), or exact",
    )
    delta: float | None = Field(
        default=None, ge=1e-6, le=1, description="δ of finite_difference, times q; null is 0.001 there"
    )

    @model_validator(mode="after")
    def _check_delta(self) -> Self:
        if self.delta is not None and self.hessian != "finite_difference":
            raise ValueError(
                f"delta: only hessian: finite_difference uses it (got {self.delta:g} with hessian {self.hessian}); set "
                "it to null"
            )
        return self

    @model_validator(mode="after")
    def _one_batch(self) -> Self:
        check_one_batch(self.local, "the gradient of F_i is not linear in the batch of its inner step")
        return self

    @property
    def step(self) -> float | None:
        """Step δ of the finite difference; None if none is used."""
        return (self.delta or 1e-3) if self.hessian == "finite_difference" else None

    @property
    def adaptation(self) -> LocalSGD:
        """SGD from the shared model to ``personal`` (line 9), without steps if they are the same."""
        steps = self.personalize_steps if self.inner_lr else 0
        return self.local.plain(self.inner_lr or 1.0).with_steps(steps=steps)


class PerFedAvgSettings(MetaLearning, Averaging):
    """Keys of ``algorithm`` for Per-FedAvg."""


class PerFedAvg(FedAvg):
    """Shared model that one step of SGD adapts."""

    name = "per-fedavg"
    settings: ClassVar[Any] = PerFedAvgSettings
    example = {"inner_lr": 0.05, "hessian": "finite_difference"}
    predictors = {"personal": "Per-FedAvg", "global": "Per-FedAvg, shared model"}
    adaptation_key = "inner_lr"
    no_example_privacy = (
        "The gradient after an inner step depends on two batches together, so that no example's part of it can be "
        "clipped."
    )

    def differentiates_twice(self, settings: MetaLearning) -> bool:
        """Return True with the exact Hessian."""
        return settings.hessian == "exact"

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: MetaLearning) -> Trained:
        """Train a client as in Algorithm 1 (lines 2-7): SGD on F_i, momentum and clipping on its gradient alone."""
        ordered = LongestFirst.from_counts([s.local.count(len(client.train)) for client in group.clients])
        local = LocalTrainer(model, group, mask_absent=s.local.mask_absent, members=ordered.order)
        w, counts, losses = local.parameters(ordered.rows(theta)), ordered.counts, list[Tensor]()
        step = local.sgd(list(w.values()), s.local)
        purposes = ("train", "inner", "hessian")[: 2 if s.hessian == "none" else 3]

        def draw(skip: int) -> Iterator[tuple[Batch, ...]]:
            size, shrinking = s.local.batch_size, local.stacked
            batches = [local.batches(size, counts, name, shrinking=shrinking, skip=skip) for name in purposes]
            return zip(*batches, strict=True)

        state = LoopState(w, histories=[losses], optimizers=[step])
        for outer, inner, *third in local.continued(draw, state, counts):
            gradients, loss = meta_gradient(local, local.first(w, local.going(outer)), s, inner, outer, *third)
            losses.append(local.padded(loss))
            step(gradients, None)  # line 7
        also = "a smaller algorithm.inner_lr"
        return local.trained(local.join(w), losses, counts, "local.lr", s.local.lr, also).mapped(ordered.back)


PER_FEDAVG = PerFedAvg()
