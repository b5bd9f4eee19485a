"""PeFLL: personalized federated learning by learning to learn (papers/001: Scott, Zakerinia, Lampert, ICLR 2024).

An embedding network η_v turns a client's data into a descriptor v on the client; a hypernetwork η_h turns v into the
client's model θ on the server. Defaults are the paper's. Where the official code does something else, that is a named
option: server Adam, descriptor standardization, clipping, the descriptor from all data, no ReLU before the
hypernetwork's output (docs/algorithms/pefll.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    Shapes,
    Statistics,
    Task,
    opened_by,
)
from fedloom.algorithms.training import LocalSGD, examples, first_batch, local_sgd, predictors_of
from fedloom.data.federated import ClientData
from fedloom.errors import DataError, ExperimentError
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models import embedding
from fedloom.models.flat import vjp
from fedloom.models.hypernetwork import Hypernetwork, Pullback
from fedloom.settings import Settings

# --- what travels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EmbeddingNetwork(Message):
    """Opens training (Algorithm 2, line 3)."""

    eta_v: Tensor = broadcast(Quantity.EMBEDDING_NETWORK)  # [|η_v|]


@dataclass(frozen=True, eq=False)
class DescribeYourself(Message):
    """Opens prediction (Algorithm 1, line 1)."""

    eta_v: Tensor = broadcast(Quantity.EMBEDDING_NETWORK)  # [|η_v|]


@dataclass(frozen=True, eq=False)
class Descriptor(Message):
    """v_i (Algorithm 2, line 7; Algorithm 1, line 4)."""

    v: Tensor = rows(Quantity.DESCRIPTOR)  # [c, l]


@dataclass(frozen=True, eq=False)
class PersonalizedModel(Message):
    """θ_i (Algorithm 2, line 9; Algorithm 1, line 6)."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d]


@dataclass(frozen=True, eq=False)
class ModelUpdate(Message):
    """Δθ_i = θ_i_new - θ_i (Algorithm 2, line 11), and what the training was like."""

    delta_theta: Tensor = rows(Quantity.MODEL_UPDATE)  # [c, d]
    steps: Tensor = rows(Quantity.COUNT)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS)  # [c, 1] float64


@dataclass(frozen=True, eq=False)
class DescriptorUpdate(Message):
    """Δv_i (Algorithm 2, line 13)."""

    d_v: Tensor = rows(Quantity.DESCRIPTOR_UPDATE)  # [c, l]


@dataclass(frozen=True, eq=False)
class EmbeddingUpdate(Message):
    """Δη_v^(i) (Algorithm 2, line 15)."""

    d_eta_v: Tensor = rows(Quantity.EMBEDDING_NETWORK_UPDATE)  # [c, |η_v|]


# --- settings ---------------------------------------------------------------------------------------------------------


class DescriptorSettings(Settings):
    """How a client is described."""

    size: int | None = Field(default=None, ge=1, description="l; null is 1 + n // 4 (papers/001, A.2: n/4)")
    train: Literal["batch", "all"] = Field(default="batch", description="data of the descriptor in training rounds")
    evaluate: Literal["batch", "all"] = Field(default="batch", description="data of the descriptor in prediction")
    batch_size: int = Field(default=32, ge=1, description="size of the descriptor's batch (papers/001, A.2)")
    standardize: Literal["none", "first"] = Field(
        default="none",
        description="'first': shift and scale descriptors by the mean and deviation over the coordinates of the first "
        "one of the first round, kept from then on (official code)",
    )


class EmbeddingSettings(Settings):
    """The embedding network."""

    network: Literal["lenet", "linear", "mlp", "lstm"] = Field(
        default="lenet",
        description="lenet (images; papers/001, Table 4), linear on the labels alone, mlp (images and features; "
        "papers/001, Table 9), lstm (tokens; papers/001, A.3)",
    )
    width: int | None = Field(
        default=None, ge=1, description="of the hidden layers of mlp and lstm; null is 100 for mlp and 256 for lstm"
    )
    labels: bool = Field(default=True, description="False: φ sees only x, so that unlabelled clients can be described")

    @model_validator(mode="after")
    def _sees_something(self) -> Self:
        if self.network == "linear" and not self.labels:
            raise ValueError("network linear sees nothing but labels: found labels=False, allowed with it: True")
        if self.width is not None and self.network not in ("mlp", "lstm"):
            raise ValueError(f"network {self.network} has no free width: found width={self.width}, allowed: null")
        return self


class HypernetworkSettings(Settings):
    """The hypernetwork."""

    size: Literal["S", "M", "L"] = Field(default="M", description="papers/001, A.5; M is Table 5")
    output_relu: bool = Field(default=True, description="ReLU before the output layer (the official code has none)")


class ServerUpdate(Settings):
    """Lines 17 and 18."""

    rule: Literal["paper", "adam"] = Field(
        default="paper",
        description="'paper': η ← (1 - 2βλ)η + mean Δη with β the clients' rate; 'adam': Adam on -mean Δη (official "
        "code), with η ← (1 - 2·lr·λ)η beside it",
    )
    lr: float = Field(default=2e-4, gt=0, description="Adam's learning rate")
    clip: float | None = Field(default=None, gt=0, description="largest joint norm of (mean Δη_h, mean Δη_v)")


class PeFLLSettings(Settings):
    """Keys of ``algorithm`` for PeFLL."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="line 10")
    lambda_h: float = Field(default=1e-3, ge=0, description="λ_h of λ_h‖η_h‖²")
    lambda_v: float = Field(default=1e-3, ge=0, description="λ_v of λ_v‖η_v‖²")
    descriptor: DescriptorSettings = Field(default=DescriptorSettings(), description="how a client is described")
    embedding: EmbeddingSettings = Field(default=EmbeddingSettings(), description="the embedding network η_v")
    hypernetwork: HypernetworkSettings = Field(default=HypernetworkSettings(), description="the hypernetwork η_h")
    server: ServerUpdate = Field(default=ServerUpdate(), description="lines 17-18")

    def descriptor_size(self, clients: int) -> int:
        """l for n clients."""
        return self.descriptor.size if self.descriptor.size is not None else 1 + clients // 4


EMBEDDINGS: dict[str, tuple[str, ...]] = {
    "pixels": ("lenet", "linear", "mlp"),
    "features": ("mlp", "linear"),
    "tokens": ("lstm", "linear"),
}
"""Kind of input -> embedding networks that can take it, the first one recommended."""


def embedding_network(settings: PeFLLSettings, task: Task) -> embedding.EmbeddingNetwork:
    """The embedding network of these settings.

    Raises
    ------
    ExperimentError
        If it cannot take these inputs.
    """
    size, choice = settings.descriptor_size(task.clients), settings.embedding
    allowed = EMBEDDINGS[task.kind]
    if choice.network not in allowed:
        raise ExperimentError(
            f"algorithm.embedding.network: found {choice.network!r} for inputs that are {task.kind}; "
            f"allowed: {', '.join(allowed)}",
            hint=f"set algorithm.embedding.network: {allowed[0]}",
        )
    match choice.network:
        case "linear":
            return embedding.LinearEmbedding(task.classes, size)
        case "mlp":
            width = choice.width or 100
            return embedding.MLPEmbedding(task.input_shape, task.classes, size, width=width, labels=choice.labels)
        case "lstm":
            return embedding.LSTMEmbedding(task.classes, size, width=choice.width or 256, labels=choice.labels)
        case "lenet":
            try:
                return embedding.LeNetEmbedding(task.input_shape, task.classes, size, labels=choice.labels)
            except ValueError as error:
                raise ExperimentError(
                    f"algorithm.embedding.network: found 'lenet': {error}; allowed: linear, mlp",
                    hint="algorithm.embedding.network: linear describes a client by its labels alone",
                ) from error


# --- the server -------------------------------------------------------------------------------------------------------


class PeFLLServer(ServerHalf):
    """Owns η_v and η_h; its memory does not depend on the number of clients."""

    def __init__(self, settings: PeFLLSettings, task: Task, generator: torch.Generator) -> None:
        self.settings = settings
        self.descriptor_size = settings.descriptor_size(task.clients)
        self.embedding = embedding_network(settings, task)
        self.hypernetwork = Hypernetwork(
            self.descriptor_size,
            task.model.layout.size,
            settings.hypernetwork.size,
            output_relu=settings.hypernetwork.output_relu,
        )
        self.model_size = task.model.layout.size
        self.eta_v = self.embedding.init(generator, task.dtype)
        self.eta_h = self.hypernetwork.layout.split(self.hypernetwork.init(generator, task.dtype))
        # The descriptor's shift and scale, and whether they are set (0/1).
        self.standard = torch.tensor([0.0, 1.0, 0.0], dtype=task.dtype)
        if settings.server.rule == "paper":
            self.step_v: PaperStep | AdamStep = PaperStep(settings.local.lr, settings.lambda_v)
            self.step_h: PaperStep | AdamStep = PaperStep(settings.local.lr, settings.lambda_h)
        else:
            self.step_v = AdamStep([self.eta_v], settings.server.lr, settings.lambda_v)
            self.step_h = AdamStep(list(self.eta_h.values()), settings.server.lr, settings.lambda_h)
        self._pending: Callable[[], None] | None = None

    def state(self) -> dict[str, Tensor]:
        """η_v, η_h by layer, the standardization, the optimizer's moments."""
        self._settle()
        return {
            "eta_v": self.eta_v,
            **{f"eta_h.{name}": value for name, value in self.eta_h.items()},
            "standard": self.standard,
            **{f"step_v.{name}": value for name, value in self.step_v.state().items()},
            **{f"step_h.{name}": value for name, value in self.step_h.state().items()},
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state, in place."""
        self._pending = None
        for key, value in self.state().items():
            value.copy_(state[key])

    def shapes(self) -> Shapes:
        """v, Δθ and Δη_v."""
        return {
            Descriptor: {"v": (self.descriptor_size,)},
            ModelUpdate: {"delta_theta": (self.model_size,), "steps": (1,), "loss": (1,)},
            EmbeddingUpdate: {"d_eta_v": tuple(self.eta_v.shape)},
        }

    def train_round(self, round: Round) -> Statistics:
        """Algorithm 2, lines 2-18."""
        cohort = round.sample()  # line 2
        described = cohort.send(EmbeddingNetwork(self.eta_v), meanwhile=self._settle)  # lines 3-7
        standard = self._standard(described)
        theta, pullback = self.hypernetwork.vjp(self.eta_h, self._standardized(described.v, standard))  # line 8
        updates = cohort.send(PersonalizedModel(theta))  # lines 9-11
        back = pullback(updates.delta_theta, updates.mean_weights)  # line 12
        later = Later(back)
        returned = cohort.send(DescriptorUpdate(back.d_v / standard[1]), meanwhile=later.compute)  # lines 13-15
        self._update(later.d_eta_h, returned.mean(returned.d_eta_v), standard)  # lines 17-18
        return {"client_steps": updates.total(updates.steps), "loss": float(updates.mean(updates.loss))}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Algorithm 1."""
        self._settle()
        described = cohort.send(DescribeYourself(self.eta_v))  # lines 1-4
        cohort.record("descriptor", described.v)
        theta = self.hypernetwork(self.eta_h, self._standardized(described.v, self.standard))  # line 5
        return cohort.send(PersonalizedModel(theta))  # line 6

    def _standard(self, described: Replies[Descriptor]) -> Tensor:
        """(shift, scale, set) for this round: set by the first descriptor, when it is asked for."""
        if self.settings.descriptor.standardize == "none" or self.standard[2]:
            return self.standard
        first = described.v[int(described.present.nonzero()[0])]
        # A one-coordinate or constant descriptor has no spread to scale by.
        scale = first.std() if first.numel() > 1 and first.std() > 0 else torch.ones(())
        return torch.stack([first.mean(), scale.to(first.dtype), torch.ones((), dtype=first.dtype)])

    def _standardized(self, v: Tensor, standard: Tensor) -> Tensor:
        return (v - standard[0]) / standard[1]

    def _update(self, d_eta_h: dict[str, Tensor], d_eta_v: Tensor, standard: Tensor) -> None:
        """Lines 17-18. η_h's part, nearly all of the work, waits for the next round's first exchange.

        Raises
        ------
        FloatingPointError
            If an update is not finite; nothing has been changed then.
        """
        gradients_h = list(d_eta_h.values())
        norm = torch.stack([*torch._foreach_norm(gradients_h), d_eta_v.norm()]).norm()
        if not torch.isfinite(norm):
            raise FloatingPointError("the server update (Δη_h, Δη_v) is not finite")
        clip = self.settings.server.clip
        factor = min(1.0, clip / (float(norm) + 1e-6)) if clip is not None else 1.0
        self.standard = standard
        # A tensor of its own: the one that was sent may still be on its way to a client that was lost.
        self.eta_v = self.eta_v.clone()
        self.step_v.apply([self.eta_v], [d_eta_v], factor)
        parameters = list(self.eta_h.values())
        self._pending = lambda: self.step_h.apply(parameters, gradients_h, factor)

    def _settle(self) -> None:
        """Finish the update of η_h. Runs while clients compute descriptors, which do not depend on η_h."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending()


class Later:
    """Δη_h, computed while the clients work on line 14."""

    def __init__(self, back: Pullback) -> None:
        self._back = back
        self.d_eta_h: dict[str, Tensor] = {}

    def compute(self) -> None:
        """Make the products with the hypernetwork's last layer."""
        self.d_eta_h = self._back.d_eta_h()


class PaperStep:
    """η ← (1 - 2βλ) η + mean Δη (lines 17-18), in place."""

    def __init__(self, beta: float, decay: float) -> None:
        self.shrink = 1 - 2 * beta * decay

    def state(self) -> dict[str, Tensor]:
        """No state."""
        return {}

    @torch.no_grad()
    def apply(self, parameters: list[Tensor], updates: list[Tensor], factor: float) -> None:
        """One step along ``factor * updates``."""
        if self.shrink != 1:
            torch._foreach_mul_(parameters, self.shrink)
        torch._foreach_add_(parameters, updates, alpha=factor)


class AdamStep:
    """Adam on -mean Δη, and the shrink (1 - 2·lr·λ) beside it, which is AdamW's decay, in place and in one pass.

    D. Kingma, J. Ba, ICLR 2015, Algorithm 1; β = (0.9, 0.999), ε = 1e-8.
    """

    def __init__(self, parameters: list[Tensor], lr: float, decay: float) -> None:
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]
        self.steps = [torch.zeros(()) for _ in parameters]
        self.lr = lr
        self.decay = decay

    def state(self) -> dict[str, Tensor]:
        """Moments and the number of steps."""
        named: dict[str, Tensor] = {}
        for i, (m, v, t) in enumerate(zip(self.first, self.second, self.steps, strict=True)):
            named |= {f"{i}.first": m, f"{i}.second": v, f"{i}.steps": t}
        return named

    @torch.no_grad()
    def apply(self, parameters: list[Tensor], updates: list[Tensor], factor: float) -> None:
        """One step along ``factor * updates``; the updates are consumed."""
        torch._foreach_mul_(updates, -factor)
        torch._foreach_add_(self.steps, 1)
        torch._fused_adamw_(
            parameters,
            updates,
            self.first,
            self.second,
            [],
            self.steps,
            lr=self.lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=2 * self.decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )


# --- the client -------------------------------------------------------------------------------------------------------


class PeFLLClient(ClientHalf):
    """Describes itself, trains what it is given, and passes its half of the chain rule back."""

    def __init__(self, settings: PeFLLSettings, task: Task) -> None:
        self.settings = settings
        self.task = task
        self.embedding = embedding_network(settings, task)

    @opened_by(EmbeddingNetwork)
    def train(self, clients: Group, opening: EmbeddingNetwork) -> Conversation:
        """Algorithm 2, lines 5-15."""
        v, pullback = self._describe(clients, opening.eta_v, self.settings.descriptor.train, "descriptor")  # lines 5-6
        model: PersonalizedModel = yield Descriptor(v)  # lines 7-9
        theta, steps, loss = local_sgd(self.task.model, model.theta, clients, self.settings.local)  # line 10
        feedback: DescriptorUpdate = yield ModelUpdate(theta - model.theta, steps, loss)  # lines 11-13
        yield EmbeddingUpdate(pullback(feedback.d_v))  # lines 14-15
        return None

    @opened_by(DescribeYourself)
    def personalize(self, clients: Group, opening: DescribeYourself) -> Conversation:
        """Algorithm 1, lines 2-6."""
        how = self.settings.descriptor.evaluate
        v, _ = self._describe(clients, opening.eta_v, how, "evaluation-descriptor", graph=False)
        model: PersonalizedModel = yield Descriptor(v)
        return predictors_of(self.task.model, personal=model.theta)

    def _describe(
        self, clients: Group, eta_v: Tensor, how: str, purpose: str, *, graph: bool = True
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Descriptors ``[g, l]``, and the pullback ``[g, l] -> [g, |η_v|]``, one row per client."""
        layout = self.embedding.layout
        parameters = [layout.leaves(eta_v, requires_grad=graph) for _ in clients.clients]
        described = []
        for i, client in enumerate(clients.clients):
            x, y = self._visible(client)
            if how == "batch":
                index = first_batch(client.train, self.settings.descriptor.batch_size, clients.generator(i, purpose))
                x, y = x[index], None if y is None else y[index]
            described.append(self.embedding.describe(parameters[i], x, y))

        def pullback(d_v: Tensor) -> Tensor:
            rows = []
            for leaves, v, d in zip(parameters, described, d_v, strict=True):
                gradients = vjp(v, list(leaves.values()), d)
                rows.append(layout.join(dict(zip(leaves, gradients, strict=True))))
            return torch.stack(rows)

        return torch.stack([v.detach() for v in described]), pullback

    def _visible(self, client: ClientData) -> tuple[Tensor, Tensor | None]:
        """What φ may see of a client: its inputs, and its labels unless it is the unlabelled variant."""
        train = examples(client)
        if not self.settings.embedding.labels:
            return train.x, None
        if train.y is None:
            raise DataError(
                f"client {client.id}: its train split has no labels, which the embedding network takes",
                hint="train with algorithm.embedding.labels: false to describe unlabelled clients",
            )
        return train.x, train.y


PEFLL = Algorithm(
    name="pefll",
    version=1,
    settings=PeFLLSettings,
    server=PeFLLServer,
    client=PeFLLClient,
    messages=(
        EmbeddingNetwork,
        DescribeYourself,
        Descriptor,
        PersonalizedModel,
        ModelUpdate,
        DescriptorUpdate,
        EmbeddingUpdate,
    ),
    labelled=lambda settings: settings.embedding.labels,
)
