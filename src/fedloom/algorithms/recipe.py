"""Recipe for methods with one shared model that every client personalizes; a method supplies the differences.

A round sends the shared model to a cohort, every client trains it, and the server moves it by the mean of their changes
(B. McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017,
arXiv 1602.05629, Algorithm 1). Local training, aggregation, the shared part of the model, and personalization are
parameters of :func:`shared_model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import ClientGroup, Cohort, Conversation, Round, Task, conversation
from fedloom.algorithms.client import LocalSGD, NothingToTrainOn, Trained, train
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.flat import FlatModel, Layout
from fedloom.models.predictors import Predictors, predictors_of
from fedloom.settings import Settings

# --- what differs -----------------------------------------------------------------------------------------------------

Train: TypeAlias = Callable[[FlatModel, ClientGroup, Tensor, Any], Trained]
"""``(model, group, shared [g, s], settings) -> Trained``, whose ``theta`` is the shared part after training."""

Aggregate: TypeAlias = Callable[[Tensor, Replies[Any], Any], Tensor]
"""``(shared [s], updates, settings) -> shared [s]``."""

Personalize: TypeAlias = Callable[[FlatModel, ClientGroup, Tensor, Any], Mapping[str, Tensor] | Predictors]
"""``(model, group, shared [g, s], settings) -> {predictor: θ [g, d]}``, or predictors that are not vectors."""


class Averaging(Settings):
    """Keys of ``algorithm`` common to all methods with a shared model."""

    server_lr: float = Field(default=1.0, gt=0, description="factor on the average update")
    weighting: Literal["examples", "uniform"] = Field(default="examples", description="average by n_i or uniformly")
    max_norm: float | None = Field(
        default=None, gt=0, description="largest norm of a client's update, which is scaled down to it; null: any"
    )
    trim: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="share of the clients' values left out at each end, coordinate by coordinate; 0.5: the median",
    )

    @model_validator(mode="after")
    def _trimmed_alike(self) -> Self:
        if self.trim and self.weighting != "uniform":
            raise ValueError(
                f"trim: found {self.trim:g} with weighting {self.weighting}; allowed: with weighting uniform, since "
                "values are left out by how many clients have them"
            )
        return self

    @property
    def robust(self) -> bool:
        """True if the server processes each update separately."""
        return self.max_norm is not None or self.trim > 0


class FineTuning(Averaging):
    """Settings for methods that fine-tune by SGD."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="local training in a round")
    personalize_steps: int = Field(default=0, ge=0, description="local SGD steps from the global model to personal")


def local_sgd(model: FlatModel, group: ClientGroup, theta: Tensor, s: Any) -> Trained:
    """Train the shared model by plain SGD."""
    return train(model, group, theta, s.local)


def mean_update(updates: Replies[Any], s: Averaging) -> Tensor:
    """Return Σ p_i Δθ_i ``[s]`` over present clients, p_i by examples or uniform, or the robust mean if one is set."""
    changes = updates.delta_theta if s.max_norm is None else bounded(updates.delta_theta, s.max_norm)
    if s.trim:
        return trimmed_mean(changes[updates.present], s.trim)
    weights = updates.weights if s.weighting == "examples" else updates.mean_weights
    mean: Tensor = updates.mean(changes, weights)
    return mean


def norms_of(updates: Replies[Any], s: Any) -> dict[str, float]:
    """Return statistics of bounded updates: the median of their norms, and the number above the bound."""
    if not isinstance(s, Averaging) or s.max_norm is None:
        return {}
    norms = torch.linalg.vector_norm(updates.delta_theta[updates.present], dim=1, dtype=torch.float64)
    return {"update_norm": float(norms.median()), "bounded": float((norms > s.max_norm).sum())}


def bounded(x: Tensor, most: float) -> Tensor:
    """Scale rows ``[c, s]`` down to at most this ℓ2 norm; smaller rows stay bitwise unchanged.

    Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, Can you really backdoor federated learning?, 2019,
    arXiv 1911.07963, §3.
    """
    norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    scale = torch.where(norms > most, most / norms, 1.0)
    found: Tensor = x * scale.to(x.dtype)[:, None]
    return found


def trimmed_mean(x: Tensor, share: float) -> Tensor:
    """Return the mean ``[s]`` of m rows ``[m, s]`` without the ⌊share · m⌋ largest and smallest of each coordinate.

    At least one value remains, or two of an even number: a share of a half gives the median. D. Yin, Y. Chen,
    K. Ramchandran, P. Bartlett, Byzantine-robust distributed learning, ICML 2018, arXiv 1803.01498, Definitions 1, 2.
    """
    rows = len(x)
    cut = min(math.floor(share * rows + 1e-9), (rows - 1) // 2)  # 0.29 · 100 is 28.999...
    parts = []
    for columns in torch.split(x, COLUMNS, dim=1):  # sorting copies
        middle = columns.sort(dim=0).values[cut : rows - cut]
        total = torch.zeros_like(middle[0])
        for row in middle:
            total += row
        parts.append(total / len(middle))
    return torch.cat(parts)


COLUMNS = 1 << 16
"""Coordinates per piece of a trimmed mean."""


def average(theta: Tensor, updates: Replies[Any], s: Any) -> Tensor:
    """Return θ + lr Σ p_i Δθ_i (:func:`mean_update`)."""
    change: Tensor = s.server_lr * mean_update(updates, s)
    return theta + change


def fine_tune(model: FlatModel, group: ClientGroup, theta: Tensor, s: Any) -> dict[str, Tensor]:
    """Return ``personal``, the shared model after ``personalize_steps`` local steps, and ``global``, before them."""
    personal = theta
    if s.personalize_steps:
        personal = train(model, group, theta, s.local.with_steps(steps=s.personalize_steps), purpose="fine-tune").theta
    return {"personal": personal, "global": theta}


def or_shared_alone(
    model: FlatModel, group: ClientGroup, shared: Tensor, make: Callable[[], Mapping[str, Tensor] | Predictors]
) -> Predictors:
    """Return the predictors from ``make``, or only ``global`` for a client without examples to train on.

    Parameters
    ----------
    shared
        ``[g, d]``, the model behind ``global``.

    Raises
    ------
    NothingToTrainOn
        If such a client is one of several in the group; the group is then served one by one.
    """
    try:
        made = make()
    except NothingToTrainOn:
        if len(group) > 1:
            raise
        made = {"global": shared}
    return predictors_of(model, **made) if isinstance(made, Mapping) else made


def part_of(layout: Layout, shared: str) -> slice:
    """Return the slice of θ that holds ``all``, the ``body`` or the ``head``."""
    return {"all": slice(None), "body": slice(layout.body_size), "head": slice(layout.body_size, None)}[shared]


# --- what travels -----------------------------------------------------------------------------------------------------


class SharedModel(Message):
    """Opening of training: the shared model, or its shared part."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [s]


class Update(Message):
    """Result of local training."""

    delta_theta: Tensor = rows(Quantity.MODEL_UPDATE, "s")  # [c, s]
    steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64


class PersonalizeRequest(Message):
    """Opening of personalization: the same part of the model."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [s]


# --- the two halves ---------------------------------------------------------------------------------------------------


class SharedModelServer(base.ServerAlgorithm):
    """Server that keeps the shared model, or its shared part, and moves it by the result of ``aggregate``.

    The keyword parameters are those of :func:`shared_model`.
    """

    def __init__(
        self,
        settings: Any,
        task: Task,
        generator: torch.Generator,
        *,
        aggregate: Aggregate,
        bounds: Callable[[Any, int], Mapping[str, float]],
        shared: Literal["all", "body", "head"],
        whole: bool,
        update: type[Update],
    ) -> None:
        super().__init__(settings, task)
        self.aggregate, self.update, self._bounds = aggregate, update, bounds
        theta, part = task.model.init(generator, task.dtype), part_of(task.model.layout, shared)
        self.sizes["s"] = len(theta[part])
        self.state["theta"] = theta if whole else theta[part].clone()
        self._part = part if whole else slice(None)  # of the kept tensor

    def update_bounds(self, examples: int) -> Mapping[str, float]:
        """Return the method's bounds of an update."""
        return self._bounds(self.settings, examples)

    def train_round(self, round: Round) -> base.Statistics:
        """Let a cohort train the shared model, and aggregate the updates."""
        updates = round.sample().send(SharedModel(self.state["theta"]), self.update)
        theta = self.state["theta"].clone()
        theta[self._part] = self.aggregate(theta[self._part], updates, self.settings)
        self.state["theta"] = theta
        statistics = {"client_steps": updates.total(updates.steps), "loss": float(updates.mean(updates.loss))}
        return statistics | norms_of(updates, self.settings)

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the shared model for the clients to personalize."""
        return cohort.send(PersonalizeRequest(self.state["theta"]))


def shared_model(
    name: str,
    settings: type[Settings],
    *,
    titles: Mapping[str, str],
    local: Train = local_sgd,
    aggregate: Aggregate = average,
    personalize: Personalize = fine_tune,
    steps: Callable[[Any, int], int] = lambda s, examples: s.personalize_steps,
    update_bounds: Callable[[Any, int], Mapping[str, float]] = lambda s, examples: s.local.update_bounds(examples),
    shared: Literal["all", "body", "head"] = "all",
    whole: bool = False,
    needs_head: bool = False,
    linear_head: bool = False,
    needs_features: bool = False,
    own_loss: bool = True,
    by_batch: bool = True,
    stateful: bool = False,
    needs_classes: bool = False,
    update: type[Update] = Update,
    server: type[SharedModelServer] = SharedModelServer,
    requires_fixed_population: Callable[[Any], tuple[str, str, str] | None] = lambda settings: None,
    check_client: Callable[[Any, int, int], str | None] = lambda settings, examples, classes: None,
    version: int = 1,
) -> base.Algorithm:
    """Return a method, given its differences from the recipe.

    Parameters
    ----------
    titles
        Predictor -> name in tables, in the order in which ``personalize`` returns the predictors.
    local, aggregate, personalize
        Local training in a round, aggregation of the answers, and the way a client gets its predictors.
    steps
        ``(settings, train examples) -> int``: SGD steps by which a client gets ``personal``.
    update_bounds
        ``(settings, train examples) -> bounds`` of an update (:meth:`ServerAlgorithm.update_bounds`).
    shared
        ``body``: all but the last linear layer is sent, averaged and checkpointed; the head stays with the client.
        ``head``: the reverse.
    whole
        The server keeps and sends all of θ, and the part that is not shared keeps its initial values. ``local`` and
        ``personalize`` receive θ ``[g, d]``; ``local`` returns the shared part.
    needs_head
        Reject a model of one layer, as is always done if only a part is shared.
    linear_head
        Reject a model whose head is parametrized (weight or spectral normalization).
    needs_features
        Reject a model that does not end in a linear layer on features.
    own_loss
        Train with the model's loss. If False, reject a model that defines its own loss.
    by_batch
        Train by :func:`train`, which tracks the statistics of a model that normalizes by the batch. If False, reject
        such a model.
    stateful
        ``local`` keeps a state of each client (:meth:`ClientGroup.save_state`).
    update
        Message class of the clients' answers; ``Trained.also`` has the fields that :class:`Update` lacks.
    check_client
        ``(settings, train examples, classes among them)`` -> reason why a client cannot train, or None.
    server
        Server half; override it if rounds differ, or if more than the model is kept.
    """

    def made(settings: Any, task: Task, generator: torch.Generator) -> base.ServerAlgorithm:
        return server(
            settings,
            task,
            generator,
            aggregate=aggregate,
            bounds=update_bounds,
            shared=shared,
            whole=whole,
            update=update,
        )

    def check_model(settings: Any, model: FlatModel) -> None:
        if (needs_head or shared != "all") and not model.layout.head:
            one = "whose outputs are not those of one linear layer with parameters of its own"
            found = one if model.layout.headless else "of one layer"
            raise ExperimentError(
                f"model.name: found a model {found}, with {name}, which needs a last layer and others before it; "
                "allowed: a model with more layers, whose outputs are those of a linear one"
            )
        if linear_head and not model.layout.head_is_linear:
            raise ExperimentError(
                f"model.name: {name} adds the heads of clients, and the head {model.layout.last!r} of this model is "
                f"parametrized ({', '.join(model.layout.head)}). Make it a plain linear layer"
            )
        if needs_features and not model.has_features:
            raise ExperimentError(
                f"model.name: found a model whose outputs are not those of one linear layer, with {name}, which "
                "needs what goes into that; allowed: a model whose are"
            )
        if model.own_loss and not own_loss:
            raise ExperimentError(
                f"model.name: found a model with a loss of its own, with {name}, which trains with another; "
                "allowed: a model without one"
            )
        if not by_batch:
            base.no_batch_norm(name)(settings, model)

    class Client(base.ClientAlgorithm):
        def __init__(self, settings: Any, task: Task) -> None:
            super().__init__(settings, task)
            self._part = part_of(task.model.layout, shared) if whole else slice(None)  # of the sent tensor

        @conversation
        def train(self, clients: ClientGroup, opening: SharedModel) -> Conversation:
            start = opening.theta.expand(len(clients), -1)
            trained = local(self.task.model, clients, start, self.settings)
            answer = {"delta_theta": trained.theta - start[:, self._part], "steps": trained.steps, "loss": trained.loss}
            yield update(**{**answer, **trained.also})
            return None

        @conversation
        def personalize(self, clients: ClientGroup, opening: PersonalizeRequest) -> Predictors:
            model, start = self.task.model, opening.theta.expand(len(clients), -1)

            def make() -> Mapping[str, Tensor] | Predictors:
                return personalize(model, clients, start, self.settings)

            if "global" in titles:
                return or_shared_alone(model, clients, start, make)
            made = make()
            return predictors_of(model, **made) if isinstance(made, Mapping) else made

        def personalization_steps(self, predictor: str, examples: int) -> int:
            return steps(self.settings, examples) if predictor == "personal" else 0

    Client.predictors, Client.stateful = tuple(titles), stateful
    return base.Algorithm(
        name=name,
        version=version,
        settings=settings,
        server=made,
        client=Client,
        messages=(SharedModel, update, PersonalizeRequest),
        needs_classes=needs_classes,
        titles=lambda settings: titles,
        requires_fixed_population=requires_fixed_population,
        check_model=check_model,
        check_client=check_client,
        needs_each_update=lambda settings: isinstance(settings, Averaging) and settings.robust,
    )
