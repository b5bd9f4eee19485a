"""FGDRO-KL and FGDRO-KL-Adam: a shared model for a mixture of clients in which large losses weigh more.

Z. Guo, T. Yang, Communication-efficient federated group distributionally robust optimization, NeurIPS 2024,
arXiv 2410.06369. max over p of Σ p_i f_i(w) - λ KL(p ‖ 1/N) is F(w) = λ log((1/N) Σ exp(f_i(w)/λ)). Its gradient is a
composition of three levels, which clients estimate by moving averages in local steps: u_i of f_i, v of the mean of
exp(u_i/λ), and m of the gradient. The server averages w, v and m, and q, the second moment of Adam-type steps. For
line numbers, and details that the available sources leave open, see docs/algorithms/fgdro-kl.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Conversation, Round, Setup, conversation
from fedloom.algorithms.client import LocalTrainer
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FineTuningClient, PersonalizeRequest, SharedModelServer
from fedloom.algorithms.local_sgd import LocalSGD, PlainSGD
from fedloom.algorithms.progress import LoopState
from fedloom.algorithms.sums import Summed, SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.messages import Message, Quantity, broadcast, rows


class FGDROServer(SharedModelServer):
    """Server that keeps w, λ log v, m and, for Adam, q; exponentials are relative to its λ log v."""

    def __init__(self, settings: FGDROSettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup, generator)
        self.sizes["moments"], theta = settings.moments, self.state["theta"]
        self.state["value"] = torch.zeros(1, dtype=torch.float64)
        self.state["moments"] = theta.new_zeros(settings.moments, len(theta))

    def train_round(self, round: Round) -> base.Statistics:
        """Perform lines 1 and 10-12.

        Raise FloatingPointError if v is not positive, which honest answers cannot cause.
        """
        theta, value = self.state["theta"], self.state["value"]
        updates = round.sample().send(RobustModel(theta, value, self.state["moments"]), RobustUpdate)  # line 1
        self.state["theta"] = theta + updates.mean(updates.delta_theta)  # line 10
        moments = updates.mean(updates.moments).to(theta)  # line 11
        self.state["moments"] = torch.cat([moments[:1], moments[1:].clamp(min=0)])  # q of sums of rounded integers
        if round.number == 1:
            self.state["value"] = updates.mean(updates.value)
        else:
            self.state["value"] = value + self.settings.lambda_kl * self._log(updates.mean(updates.v))  # line 12
        return base.statistics_of(updates) | {"objective": float(self.state["value"])}

    def _log(self, v: Tensor) -> Tensor:
        """Return log v; raise FloatingPointError if v is not finite and positive."""
        if not 0 < float(v) < torch.inf:
            s = self.settings
            raise FloatingPointError(
                f"the mean of the clients' exponentials of losses is {float(v):g}, which is not finite and positive; "
                f"raise algorithm.lambda_kl (now {s.lambda_kl:g}), or lower local.lr (now {s.local.lr:g})"
            )
        return v.log()


class FGDROClient(FineTuningClient):
    """Client that keeps u_i, the moving average of its loss."""

    stateful = True

    @conversation
    def train(self, clients: ClientGroup, opening: RobustModel) -> Conversation:
        """Perform lines 2-9."""
        s, start = self.settings, opening.theta.expand(len(clients), -1)
        local = LocalTrainer(self.setup.model, clients, mask_absent=s.local.mask_absent)
        w = local.parameters(start)
        leaves, losses, counts = list(w.values()), list[Tensor](), [s.local.steps] * len(clients)
        moments = [_leaves(local, moment.expand(len(clients), -1)) for moment in opening.moments]
        v = torch.ones(len(clients), dtype=torch.float64)
        reference, none = opening.value.cpu().expand(len(clients)).clone(), torch.full_like(v, torch.nan)
        u = clients.load_state("u", none[:, None])[:, 0].cpu()
        changed = [*(leaf for moment in moments for leaf in moment), u, v, reference]
        state = LoopState(w, tensors=changed, histories=[losses])
        for pieces in local.steps(s.local, counts, "train", state):
            gradients, loss = local.gradient(w, *pieces)
            losses.append(loss)
            f, first = loss.double().cpu(), len(losses) == 1 and clients.round == 1
            u.copy_(torch.where(u.isnan(), f, torch.lerp(u, f, s.beta_u)))  # line 3
            reference.copy_(u if first else reference)
            weight = ((u - reference) / s.lambda_kl).exp()
            v.lerp_(weight, s.beta_v)  # line 4
            with torch.no_grad():
                h = local.scaled(gradients, (weight / v).to(loss))  # line 5
                if s.local.lambda_theta:
                    h = list(torch._foreach_add(h, leaves, alpha=2 * s.local.lambda_theta))
                averages = [h, list(torch._foreach_mul(h, h))]
                for moment, of, beta in zip(moments, averages, (s.beta_m, s.beta_q), strict=False):  # lines 6-7
                    torch._foreach_lerp_(moment, of, 1.0 if first else beta)
                _step(leaves, moments, s, s.local.rate(clients.round))  # line 8
        trained = local.trained(local.join(w), losses, counts, "local.lr", s.local.lr, "a larger algorithm.lambda_kl")
        clients.save_state(u=u[:, None])  # line 9
        yield RobustUpdate(
            trained.theta - start,
            torch.stack([local.join_gradients(w, moment) for moment in moments], 1),
            v[:, None],
            (reference + s.lambda_kl * v.log())[:, None],
            trained.steps,
            trained.loss,
        )
        return None


def _leaves(local: LocalTrainer, vectors: Tensor) -> list[Tensor]:
    """Return vectors ``[g, d]`` as lists of leaves that can be changed in place."""
    return [leaf.detach() for leaf in local.parameters(vectors).values()]


def _step(w: list[Tensor], moments: list[list[Tensor]], s: FGDROSettings, lr: float) -> None:
    """Step in place: w ← w - lr m, or w ← w - lr m / (√q + ε)."""
    if s.optimizer == "momentum":
        torch._foreach_add_(w, moments[0], alpha=-lr)
        return
    scale = torch._foreach_sqrt(moments[1])
    torch._foreach_add_(scale, s.eps)
    torch._foreach_addcdiv_(w, moments[0], scale, -lr)


# --- settings ---------------------------------------------------------------------------------------------------------


class FGDROSettings(Settings):
    """Keys of ``algorithm`` for FGDRO-KL."""

    optimizer: Literal["momentum", "adam"] = Field(
        default="adam", description="steps along m (FGDRO-KL), or along m / (√q + ε) (FGDRO-KL-Adam)"
    )
    lambda_kl: float = Field(default=1.0, gt=0, description="λ; smaller values give the largest losses more weight")
    beta_u: float = Field(default=0.1, gt=0, le=1, description="weight of a batch's loss in u_i, its moving average")
    beta_v: float = Field(default=0.01, gt=0, le=1, description="weight of exp(u_i/λ) in v, the normalizer")
    beta_m: float = Field(default=0.1, gt=0, le=1, description="weight of a gradient in m, the momentum")
    beta_q: float = Field(default=0.001, gt=0, le=1, description="weight of a squared gradient in q (adam)")
    eps: float = Field(default=1e-8, gt=0, description="ε in m / (√q + ε) (adam)")
    local: PlainSGD = Field(default=PlainSGD(steps=50, lr=0.001), description="local training; steps is the paper's I")
    personalize_steps: int = Field(
        default=0, ge=0, description="local steps from the global model to personal, by SGD or torch's Adam"
    )

    @model_validator(mode="after")
    def _same_steps(self) -> Self:
        if self.local.steps is None:
            raise ValueError("local.epochs: set local.steps instead, because v averages the same steps of all clients")
        return self

    @property
    def moments(self) -> int:
        """Number of averages of gradients: m, and q for Adam."""
        return 2 if self.optimizer == "adam" else 1

    @property
    def adaptation(self) -> LocalSGD:
        """Settings of fine-tuning."""
        sgd = self.local.sgd
        if self.optimizer == "adam":
            sgd = LocalSGD.model_validate({**dict(self.local), "optimizer": "adam", "eps": self.eps})
        return sgd.with_steps(steps=self.personalize_steps)


# --- messages ---------------------------------------------------------------------------------------------------------


class RobustModel(Message):
    """Opening of training: w, λ log v, and m with q if there is one."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [d]
    value: Tensor = broadcast(Quantity.OTHER)  # [1] float64
    moments: Tensor = broadcast(Quantity.GRADIENT)  # [1 or 2, d]


class RobustUpdate(Message):
    """Result of local training."""

    delta_theta: Tensor = rows(Quantity.MODEL_UPDATE, "d")  # [c, d]
    moments: Tensor = rows(Quantity.GRADIENT, "moments", "d")  # [c, 1 or 2, d]
    v: Tensor = rows(Quantity.OTHER, 1)  # [c, 1] float64, v of the client, divided by that of the opening
    value: Tensor = rows(Quantity.OTHER, 1)  # [c, 1] float64, λ log v of the client
    steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64


class FGDROKL(base.Algorithm):
    """Averaging that gives large losses more weight, by moving averages on the clients."""

    name = "fgdro-kl"
    settings = FGDROSettings
    example = {"local": {"steps": 3, "batch_size": 4, "lr": 0.05}}
    server = FGDROServer
    client = FGDROClient
    messages = (RobustModel, RobustUpdate, PersonalizeRequest)
    no_example_privacy = "Clients scale their gradients by exponentials of losses, which have no noise."

    def titles(self, settings: FGDROSettings) -> Mapping[str, str]:
        """Return the name of each predictor in tables."""
        name = "FGDRO-KL-Adam" if settings.optimizer == "adam" else "FGDRO-KL"
        return {"personal": f"{name} + fine-tuning", "global": name}

    def sums(self, settings: Any) -> SummedFields:
        """Return the plain sums of all fields; the server learns from v, too."""
        return sums_of(RobustUpdate, v=Summed(learned=True), value=Summed(learned=True))

    def needs_fine_sums(self, settings: FGDROSettings) -> str | None:
        """Return the reason for Adam: where q is rounded to 0, steps are as large as m / ε."""
        if settings.optimizer != "adam":
            return None
        return "divides by roots of mean squared gradients, most of which 32 bits round to 0"

    def noisy_sums_suffice(self, settings: Any) -> str | None:
        """Return the reason: noise could make a mean of exponentials negative."""
        return "takes the logarithm of a mean of exponentials of losses, which noise can make negative"


FGDRO_KL = FGDROKL()
