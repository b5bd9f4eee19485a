"""PeFLL: personalized federated learning by learning to learn.

J. Scott, H. Zakerinia, C. H. Lampert, ICLR 2024, arXiv 2306.05515 (papers/001). An embedding network η_v turns a
client's data into a descriptor v on the client; a hypernetwork η_h turns v into the client's model θ on the server.
Defaults are the paper's. Each deviation of the official code is a named option: server Adam, descriptor
standardization, clipping, the descriptor from all data, no ReLU before the hypernetwork's output
(docs/algorithms/pefll.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Literal, Self, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Conversation, Round, Setup, conversation
from fedloom.algorithms.batches import batches, visible_examples
from fedloom.algorithms.client import adapt, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import Update
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.optimizers import AdamAscent, ShrinkAndAdd
from fedloom.core.settings import Settings
from fedloom.data.inputs import Inputs, count, take
from fedloom.errors import ExperimentError, argument
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.embedding import EmbeddingNetwork, EmbeddingSettings
from fedloom.models.flat import FlatModel, vjp
from fedloom.models.hypernetwork import HypernetworkShape
from fedloom.models.predictors import predictors_of
from fedloom.models.subspace import SubspaceSettings
from fedloom.privacy.examples import Privacy
from fedloom.privacy.gaussian_mechanism import MAX_DELTA, on_grid

# --- the server -------------------------------------------------------------------------------------------------------


ServerOptimizer: TypeAlias = AdamAscent | ShrinkAndAdd
"""Optimizer of one of the two networks."""


class PeFLLServer(base.ServerAlgorithm):
    """Server of PeFLL, which owns η_v and η_h; its memory does not depend on the number of clients."""

    settings: PeFLLSettings

    def __init__(self, settings: PeFLLSettings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        size, h = settings.descriptor_size(setup.clients), settings.hypernetwork
        output_size = setup.model.layout.size if h.subspace is None else h.subspace.dimension(setup.model)
        self.embedding = settings.embedding_network(setup)
        self.hypernetwork = h.network(size, output_size)
        eta_v = self.embedding.init(generator, setup.dtype)
        eta_h = self.hypernetwork.layout.split(self.hypernetwork.init(generator, setup.dtype))
        if h.start == "model":
            in_subspace = torch.zeros(output_size, dtype=setup.dtype)
            first = in_subspace if h.subspace else setup.model.init(generator, setup.dtype)
            eta_h = self.hypernetwork.started_at(first, eta_h)
        optimizer_v, optimizer_h = settings.optimizers()
        self.sizes |= {"l": size, "s": output_size, "eta_v": len(eta_v)}
        self.state = {
            "eta_v": eta_v,
            **prefixed("eta_h", eta_h),
            # The descriptor's shift and scale, and a flag (0/1) that they are set.
            "standard": torch.tensor([0.0, 1.0, 0.0], dtype=setup.dtype),
            **prefixed("step_v", optimizer_v.start([eta_v])),
            **prefixed("step_h", optimizer_h.start(list(eta_h.values()))),
        }
        self._pending: Callable[[], None] | None = None

    def train_round(self, round: Round) -> base.Statistics:
        """Perform Algorithm 2, lines 2-18."""
        cohort = round.sample()  # line 2
        descriptors = cohort.send(
            PeFLLTrainRequest(self.state["eta_v"]), Descriptor, meanwhile=self.settle
        )  # lines 3-7
        shift, scale, _ = standard = self._standard(descriptors)
        theta, pullback = self.hypernetwork.vjp(self.eta_h, (descriptors.v - shift) / scale)  # line 8
        updates = cohort.send(PersonalizedModel(theta), Update)  # lines 9-11
        back = pullback(updates.delta_theta, updates.mean_weights)  # line 12
        d_eta_h: dict[str, Tensor] = {}
        d_v = DescriptorUpdate(back.d_v / scale)
        returned = cohort.send(d_v, EmbeddingUpdate, lambda: d_eta_h.update(back.d_eta_h()))  # lines 13-15
        self._update(d_eta_h, returned.mean(returned.d_eta_v), standard, round.number)  # lines 17-18
        return base.statistics_of(updates)

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Perform Algorithm 1."""
        self.settle()
        descriptors = cohort.send(DescriptorRequest(self.state["eta_v"]), Descriptor)  # lines 1-4
        cohort.record("descriptor", descriptors.v)
        shift, scale, _ = self.state["standard"]
        theta = self.hypernetwork(self.eta_h, (descriptors.v - shift) / scale)  # line 5
        return cohort.send(PersonalizedModel(theta))  # line 6

    @property
    def eta_h(self) -> dict[str, Tensor]:
        """Parameters η_h by layer."""
        return under("eta_h", self.state)

    def _standard(self, descriptors: Replies[Descriptor]) -> Tensor:
        """Return (shift, scale, set) for this round, set from the first descriptor if standardization is on."""
        standard = self.state["standard"]
        if self.settings.descriptor.standardize == "none" or standard[2]:
            return standard
        first = descriptors.v[int(descriptors.present.nonzero()[0])]
        # A one-coordinate or constant descriptor has no deviation to scale by.
        scale = first.std() if first.numel() > 1 and first.std() > 0 else torch.ones(())
        return torch.stack([first.mean(), scale.to(first.dtype), torch.ones((), dtype=first.dtype)])

    def _update(self, d_eta_h: dict[str, Tensor], d_eta_v: Tensor, standard: Tensor, round: int) -> None:
        """Perform lines 17-18; η_h's part, nearly all of the work, is deferred to the next round's first exchange.

        Raise FloatingPointError if an update is not finite; the state is then unchanged.
        """
        gradients_h = list(d_eta_h.values())
        norm = torch.stack([*torch._foreach_norm(gradients_h), d_eta_v.norm()]).norm()
        if not torch.isfinite(norm):
            raise FloatingPointError("the server update (Δη_h, Δη_v) is not finite")
        clip = self.settings.server.clip
        factor = min(1.0, clip / (float(norm) + 1e-6)) if clip is not None else 1.0
        # η_v is cloned: the sent tensor may still be on its way to a lost client.
        state = self.state
        state["standard"], state["eta_v"] = standard, state["eta_v"].clone()
        optimizer_v, optimizer_h = self.settings.optimizers(round)
        optimizer_v.apply([state["eta_v"]], [d_eta_v], under("step_v", state), factor)
        eta_h = list(self.eta_h.values())
        self._pending = lambda: optimizer_h.apply(eta_h, gradients_h, under("step_h", state), factor)

    def settle(self) -> None:
        """Finish the update of η_h. Runs while clients compute descriptors, which do not depend on η_h."""
        if self._pending is not None:
            update, self._pending = self._pending, None
            update()


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under names with a prefix, as a part of the state."""
    return {f"{prefix}.{key}": value for key, value in tensors.items()}


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state with this prefix, the inverse of :func:`prefixed`."""
    return {key.removeprefix(f"{prefix}."): value for key, value in state.items() if key.startswith(f"{prefix}.")}


# --- the client -------------------------------------------------------------------------------------------------------


class PeFLLClient(base.ClientAlgorithm):
    """Client that describes its data, trains the model it receives, and returns its half of the chain rule."""

    settings: PeFLLSettings

    def __init__(self, settings: PeFLLSettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.embedding = settings.embedding_network(setup)
        subspace = settings.hypernetwork.subspace
        self.subspace = None if subspace is None else subspace.of(setup.model, setup.seed, setup.dtype)

    @conversation
    def train(self, clients: ClientGroup, opening: PeFLLTrainRequest) -> Conversation:
        """Perform Algorithm 2, lines 5-15."""
        v, pullback = self._describe(clients, opening.eta_v, self.settings.descriptor.train, "descriptor")  # lines 5-6
        model: PersonalizedModel = yield Descriptor(v)  # lines 7-9
        theta = self._expanded(model.theta)
        trained = train(self.setup.model, clients, theta, self.settings.local)  # line 10
        change = trained.theta - theta
        change = change if self.subspace is None else self.subspace.project(change)
        feedback: DescriptorUpdate = yield Update(change, trained.steps, trained.loss)  # lines 11-13
        yield EmbeddingUpdate(pullback(feedback.d_v))  # lines 14-15
        return None

    @conversation
    def personalize(self, clients: ClientGroup, opening: DescriptorRequest) -> Conversation:
        """Perform Algorithm 1, lines 2-6."""
        examples = self.settings.descriptor.evaluate
        v, _ = self._describe(clients, opening.eta_v, examples, "evaluation-descriptor", graph=False)
        model: PersonalizedModel = yield Descriptor(v)
        sgd = self.settings.local.with_steps(steps=self.settings.personalize_steps)  # not in the paper: further steps
        theta = adapt(self.setup.model, clients, self._expanded(model.theta), sgd)
        return predictors_of(self.setup.model, personal=theta)

    def _expanded(self, outputs: Tensor) -> Tensor:
        """Return θ ``[g, d]`` from the hypernetwork's output: θ itself, or its coordinates ``[g, k]`` in a subspace."""
        return outputs if self.subspace is None else self.subspace.expand(outputs)

    def _describe(
        self, clients: ClientGroup, eta_v: Tensor, examples: str, purpose: str, *, graph: bool = True
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return descriptors ``[g, l]``, and the pullback ``[g, l] -> [g, |η_v|]``, one row per client."""
        layout = self.embedding.layout
        weights = [layout.leaves(eta_v, requires_grad=graph) for _ in clients.clients]
        private = self.settings.descriptor.privacy
        clip = None if private is None else private.clip
        visible = [self._visible(clients, i, examples, purpose) for i in range(len(clients))]
        v = [self.embedding.describe(w, x, y, clip) for w, (x, y) in zip(weights, visible, strict=True)]

        def pullback(d_v: Tensor) -> Tensor:
            gradients = [vjp(v_i, list(w.values()), d) for w, v_i, d in zip(weights, v, d_v, strict=True)]
            return torch.stack(
                [layout.join(dict(zip(w, g, strict=True))) for w, g in zip(weights, gradients, strict=True)]
            )

        descriptors = [v_i.detach() for v_i in v]
        if private is not None and private.noise_multiplier:
            for i, (x, y) in enumerate(visible):
                descriptors[i] = self._noisy(clients, i, f"{purpose}-noise", descriptors[i], private, eta_v, x, y)
        return torch.stack(descriptors).to(eta_v.dtype), pullback

    @staticmethod
    def _noisy(
        clients: ClientGroup,
        i: int,
        purpose: str,
        v: Tensor,
        private: DescriptorPrivacy,
        eta_v: Tensor,
        x: Inputs,
        y: Tensor | None,
    ) -> Tensor:
        """Add Gaussian noise to v ``[l]`` of examples x, y: z times 2C/n, the most that replacing one can move it."""
        context = sha256(repr(private).encode())
        for tensor in (eta_v, *([x] if isinstance(x, Tensor) else x.values()), *(() if y is None else (y,))):
            context.update(tensor.contiguous().cpu().numpy().data)
        deviation = private.noise_multiplier * 2 * private.clip / count(x)
        noise = clients.noise(i, purpose, context.digest(), len(v)).to(v.device)
        return on_grid(v + deviation * noise, deviation)

    def _visible(self, clients: ClientGroup, i: int, examples: str, purpose: str) -> tuple[Inputs, Tensor | None]:
        """Return the data that φ sees of a client: its inputs, and its labels unless the variant is unlabelled."""
        x, y = visible_examples(clients.clients[i], labels=self.settings.embedding.labels)
        if examples == "all":
            return x, y
        index = next(batches(count(x), self.settings.descriptor.batch_size, 1, clients.generator(i, purpose)))
        return take(x, index), None if y is None else y[index]


# --- settings ---------------------------------------------------------------------------------------------------------


class DescriptorPrivacy(Settings):
    """Settings of a differentially private descriptor: embeddings are clipped, and their mean gets Gaussian noise."""

    clip: float = Field(gt=0, description="C: largest ℓ2 norm of an example's embedding; larger ones are scaled down")
    noise_multiplier: float = Field(
        ge=0, description="z: noise of deviation z·2C/n on each coordinate, n being the client's training examples"
    )
    delta: float = Field(default=1e-5, gt=0, le=MAX_DELTA, description="δ of the (ε, δ) in summary.json")


class DescriptorSettings(Settings):
    """Settings of the clients' descriptors."""

    size: int | None = Field(default=None, ge=1, description="l; null is 1 + n // 4 (papers/001, A.2: n/4)")
    train: Literal["batch", "all"] = Field(default="batch", description="data of the descriptor in training rounds")
    evaluate: Literal["batch", "all"] = Field(default="batch", description="data of the descriptor in prediction")
    batch_size: int = Field(default=32, ge=1, description="size of the descriptor's batch (papers/001, A.2)")
    standardize: Literal["none", "first"] = Field(
        default="none",
        description="first: by mean and deviation of the first descriptor of the first round (official code)",
    )
    privacy: DescriptorPrivacy | None = Field(
        default=None,
        description="clip embeddings, and add noise to descriptors before they leave a client "
        "(docs/algorithms/pefll.md)",
    )

    @model_validator(mode="after")
    def _of_all_data(self) -> Self:
        if self.privacy is not None and "batch" in (self.train, self.evaluate):
            raise ValueError(
                "privacy: set train and evaluate to all, because the noise is that of a mean over all of a client's "
                f"examples (got {self.train} and {self.evaluate})"
            )
        return self


class HypernetworkSettings(HypernetworkShape):
    """Settings of the hypernetwork."""

    subspace: SubspaceSettings | None = Field(
        default=None,
        description="the output is v' of θ = θ₀ + P v', in a random subspace that clients draw from the run's seed; "
        "null: the output is θ",
    )


class ServerUpdate(Settings):
    """Settings of the server update, lines 17 and 18."""

    rule: Literal["paper", "adam"] = Field(
        default="paper",
        description="η ← (1 - 2βλ)η + mean Δη, β being the rate of local; or Adam on -mean Δη (official code)",
    )
    lr: float = Field(default=2e-4, gt=0, description="Adam's learning rate")
    decay: Literal["decoupled", "l2"] = Field(
        default="decoupled",
        description=(
            "for Adam: decoupled, η shrinks by 1 - 2·lr·λ in addition to its step; or the gradient of λ‖η‖² is added "
            "to Adam's gradient (weight_decay 2λ of PyTorch's Adam)"
        ),
    )
    clip: float | None = Field(default=None, gt=0, description="largest joint norm of (mean Δη_h, mean Δη_v)")

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if self.decay == "l2" and self.rule != "adam":
            raise ValueError(
                "decay: l2 needs rule: adam, because the shrink of rule: paper is the gradient of λ‖η‖² already"
            )
        return self


def network_for(setup: Setup, embedding: EmbeddingSettings, size: int) -> EmbeddingNetwork:
    """Return the network for the inputs and targets of a problem, with descriptors of a length ``size``."""
    shape = () if setup.targets is None else setup.targets.shape
    target = setup.outputs, size, setup.model.task, shape, setup.model
    return embedding.network_for(setup.kind, setup.input_shape, *target)


class PeFLLSettings(Settings):
    """Keys of ``algorithm`` for PeFLL."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="local training (line 10)")
    lambda_h: float = Field(default=1e-3, ge=0, description="λ_h of λ_h‖η_h‖²")
    lambda_v: float = Field(default=1e-3, ge=0, description="λ_v of λ_v‖η_v‖²")
    descriptor: DescriptorSettings = Field(
        default=DescriptorSettings(), description="settings of the clients' descriptors"
    )
    embedding: EmbeddingSettings = Field(default=EmbeddingSettings(), description="the embedding network η_v")
    hypernetwork: HypernetworkSettings = Field(default=HypernetworkSettings(), description="the hypernetwork η_h")
    server: ServerUpdate = Field(default=ServerUpdate(), description="update of both networks (lines 17-18)")
    personalize_steps: int = Field(
        default=0, ge=0, description="local SGD steps on the received model (the paper: none)"
    )

    def descriptor_size(self, clients: int) -> int:
        """Return l for n clients."""
        return self.descriptor.size if self.descriptor.size is not None else 1 + clients // 4

    def embedding_network(self, setup: Setup) -> EmbeddingNetwork:
        """Return φ for the inputs and targets of a problem."""
        return network_for(setup, self.embedding, self.descriptor_size(setup.clients))

    def optimizers(self, round: int | None = None) -> tuple[ServerOptimizer, ServerOptimizer]:
        """Return the optimizers of η_v and η_h (lines 17 and 18) in a round with local rate β."""

        def of(decay: float) -> ServerOptimizer:
            s, beta = self.server, self.local.rate(round)
            return ShrinkAndAdd(beta, decay) if s.rule == "paper" else AdamAscent(s.lr, decay, s.decay == "l2")

        return of(self.lambda_v), of(self.lambda_h)


# --- messages ---------------------------------------------------------------------------------------------------------


class PeFLLTrainRequest(Message):
    """Opening of training (Algorithm 2, line 3)."""

    eta_v: Tensor = broadcast(Quantity.EMBEDDING_NETWORK)  # [|η_v|]


class DescriptorRequest(Message):
    """Opening of prediction (Algorithm 1, line 1)."""

    eta_v: Tensor = broadcast(Quantity.EMBEDDING_NETWORK)  # [|η_v|]


class Descriptor(Message):
    """Descriptor v_i (Algorithm 2, line 7; Algorithm 1, line 4)."""

    v: Tensor = rows(Quantity.DESCRIPTOR, "l")  # [c, l]


class PersonalizedModel(Message):
    """Model θ_i of a client, or its coordinates in a subspace (Algorithm 2, line 9; Algorithm 1, line 6)."""

    theta: Tensor = rows(Quantity.MODEL)  # [c, d] or [c, k]


class DescriptorUpdate(Message):
    """Descriptor update Δv_i (Algorithm 2, line 13)."""

    d_v: Tensor = rows(Quantity.DESCRIPTOR_UPDATE)  # [c, l]


class EmbeddingUpdate(Message):
    """Embedding-network update Δη_v^(i) (Algorithm 2, line 15)."""

    d_eta_v: Tensor = rows(Quantity.EMBEDDING_NETWORK_UPDATE, "eta_v")  # [c, |η_v|]


class PeFLL(base.Algorithm):
    """Learning to learn personalized models from descriptors."""

    name = "pefll"
    no_sums = "needs each client's own descriptor and update at the server, whose hypernetwork learns from them"
    settings = PeFLLSettings
    example = {
        "embedding": {"network": "linear"},
        "descriptor": {"standardize": "first"},
        "server": {"rule": "adam", "lr": 0.01},
        "personalize_steps": 0,
    }
    needs = ("any vector",)
    server = PeFLLServer
    client = PeFLLClient
    messages = (
        PeFLLTrainRequest,
        DescriptorRequest,
        Descriptor,
        PersonalizedModel,
        Update,
        DescriptorUpdate,
        EmbeddingUpdate,
    )
    answers_privately = True
    no_example_privacy = (
        "The update of the embedding network is a derivative of a descriptor of the client's examples, which has "
        "no noise; algorithm.descriptor.privacy protects the descriptors of new clients."
    )

    def titles(self, settings: Any) -> Mapping[str, str]:
        """Return the name of each predictor in tables."""
        return {"personal": "PeFLL + fine-tuning" if settings.personalize_steps else "PeFLL"}

    def check_model(self, settings: Any, model: FlatModel) -> None:
        """Reject an embedding network on labels where there are none, and a subspace larger than the model."""
        super().check_model(settings, model)
        settings.embedding.check(model)
        if settings.hypernetwork.subspace is not None:
            settings.hypernetwork.subspace.check(model, "algorithm.hypernetwork.subspace")

    def labelled(self, settings: Any) -> bool:
        """Return True if the embedding network takes labels."""
        return bool(settings.embedding.labels)

    def starts_alike(self, settings: Any) -> bool:
        """Return True if a subspace starts at the model's initialization, or features of it describe examples."""
        return settings.hypernetwork.subspace is not None or settings.embedding.network == "pretrained"

    def requires_fixed_population(self, settings: Any) -> tuple[str, str] | None:
        """Return the reason if the size of the descriptor follows from the number of clients."""
        if settings.descriptor.size is not None:
            return None
        return "descriptor.size", "null means 1 + n/4 for n clients, but their number changes; set a number"

    def privacy(self, settings: Any) -> Privacy | None:
        """Return the privacy guarantee of a descriptor; updates of clients in training are not covered."""
        private = settings.descriptor.privacy
        if private is None:
            return None
        return Privacy((Descriptor.__name__,), private.clip, private.noise_multiplier, private.delta)

    def private(self, settings: Any, clip: float | None, noise_multiplier: float, delta: float) -> PeFLLSettings:
        """Return the settings for a client that requests a descriptor with this noise.

        Raise ExperimentError if neither the client nor the run sets C.
        """
        privacy = settings.descriptor.privacy
        if clip is None and privacy is None:
            raise ExperimentError(
                f"{argument('clip')} must be given, because the run was trained without "
                "algorithm.descriptor.privacy.clip: a number above 0, chosen independently of the protected data.",
                key="clip",
            )
        values = {"clip": privacy.clip if clip is None else clip, "noise_multiplier": noise_multiplier, "delta": delta}
        descriptor_settings = {"train": "all", "evaluate": "all", "privacy": DescriptorPrivacy.model_validate(values)}
        private_settings: PeFLLSettings = settings.model_copy(
            update={"descriptor": settings.descriptor.model_copy(update=descriptor_settings)}
        )
        return private_settings


PEFLL = PeFLL()
