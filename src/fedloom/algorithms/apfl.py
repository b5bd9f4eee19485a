"""APFL: each client mixes its own model with the shared one.

Y. Deng, M. M. Kamani, M. Mahdavi, Adaptive personalized federated learning, 2020, arXiv 2003.13461, Algorithm 1. The
shared w is trained by FedAvg. On the same batches a client trains its v_i through the mixture v̄_i = α_i v_i +
(1 - α_i) w_i, and its α_i by the derivative of the mixture's loss (eq. 10). v_i and α_i are the client's state between
rounds. Line numbers refer to docs/algorithms/apfl.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.client import LocalTrainer, LongestFirst, Parameters, Trained, adapt, laid_out
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg, FedAvgSettings
from fedloom.algorithms.progress import LoopState
from fedloom.models.flat import FlatModel


def mixture(local: LocalTrainer, alpha: Tensor, v: Parameters, w: Parameters) -> Parameters:
    """Return v̄ = α v + (1 - α) w, leaf by leaf; v itself at α = 1, w at 0."""
    with torch.no_grad():
        found = {}
        for name, mine in v.items():
            share = local.each(alpha[:, 0], mine)
            found[name] = laid_out(share * mine + (1 - share) * w[name], mine).requires_grad_()
        return Parameters(found)


def kept(group: ClientGroup, theta: Tensor, s: APFLSettings) -> tuple[Tensor, Tensor]:
    """Return v_i ``[g, d]`` and α_i ``[g, 1]``; for new clients, the shared model and the initial α."""
    return group.load_state("v", theta), group.load_state("alpha", torch.full_like(theta[:, :1], s.alpha))


class APFLSettings(FedAvgSettings):
    """Keys of ``algorithm`` for APFL."""

    alpha: float = Field(
        default=0.5, ge=0, le=1, description="first α_i, a client's share of its own model; 0 is FedAvg"
    )
    adaptive: bool = Field(default=True, description="learn α_i, with one step in every round")
    personalize_steps: int = Field(
        default=0, ge=0, description="local SGD steps from w to personal for a client without a v_i"
    )


class AdaptivePersonalizedFL(FedAvg):
    """FedAvg, and personal models that each client mixes with it."""

    name = "apfl"
    settings = APFLSettings
    needs = ("no buffers",)
    predictors = {"personal": "APFL", "global": "APFL, shared model"}
    stateful = True
    no_example_privacy = None  # w takes noisy steps, and v_i and α_i, which do not affect it, stay with their client

    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: APFLSettings) -> Trained:
        """Train a client as in Algorithm 1 (lines 3-9): w_i as in FedAvg, and separately v_i and α_i."""
        ordered, decay = LongestFirst.of([s.local.count(len(c.train)) for c in group.clients]), 2 * s.local.lambda_theta
        local = LocalTrainer(model, group, mask_absent=s.local.mask_absent, members=ordered.order)
        own, alpha = (ordered.rows(values).clone() for values in kept(group, theta, s))  # line 3
        w, v = local.parameters(ordered.rows(theta)), local.parameters(own)
        w_i, v_i = list(w.values()), list(v.values())
        step_w, step_v = local.sgd(w_i, s.local), local.sgd(v_i, s.local, decay=False)
        losses: list[Tensor] = []
        mixed: list[Tensor] = []
        state = LoopState(w, v, tensors=[alpha], histories=[losses, mixed], optimizers=[step_w, step_v])
        for pieces in local.steps(s.local, ordered.counts, "train", state, shrinking=local.stacked):
            k = local.going(pieces[0])
            both = mixture(local, alpha[:k], local.first(v, k), local.first(w, k))
            gradients, loss = local.gradient(local.first(w, k), *pieces)
            slope, loss_both = local.gradient(both, *pieces, at_home=True)
            with torch.no_grad():
                if decay:
                    slope = list(torch._foreach_add(slope, list(both.values()), alpha=decay))
                through = local.scaled(slope, alpha[:k, 0])  # ∇ of f(v̄) with respect to v
                if s.adaptive and not losses:  # line 6: once a round, at its first batch
                    along = local.join(v) - local.join(w)
                    rise = (along * local.join_gradients(w, slope)).sum(1, keepdim=True)
                    alpha.copy_((alpha - s.local.rate(group.round) * rise).clamp(0, 1))
                losses.append(local.padded(loss))
                mixed.append(local.padded(loss_both))
                step_w(gradients, None)  # line 7
                step_v(through, None)  # line 8
        personal = local.trained(local.join(v), mixed, ordered.counts, "local.lr", s.local.lr)
        group.save_state(v=ordered.back(personal.theta), alpha=ordered.back(alpha))
        shared = local.trained(local.join(w), losses, ordered.counts, "local.lr", s.local.lr)
        return Trained(shared.theta, shared.steps + personal.steps, shared.loss).mapped(ordered.back)

    def personalize(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: APFLSettings) -> dict[str, Tensor]:
        """Return ``personal`` = α_i v_i + (1 - α_i) w (line 11); for new clients, the shared model after SGD steps."""
        (v, alpha), new = kept(group, theta, s), group.new
        personal = alpha * v + (1 - alpha) * theta
        personal[new] = theta[new]  # bitwise equal
        sgd = s.local.with_steps(steps=s.personalize_steps)
        return {"personal": adapt(model, group, personal, sgd, new), "global": theta}

    def update_bounds(self, s: Any, examples: int) -> Mapping[str, float]:
        """Return the bounds of w's training; the steps include those of v_i."""
        return {**super().update_bounds(s, examples), "steps": 2 * s.local.count(examples)}


APFL = AdaptivePersonalizedFL()
