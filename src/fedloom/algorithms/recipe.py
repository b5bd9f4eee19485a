"""The recipe of methods with one shared model, of which every client makes its own: a method names what differs.

A round sends the shared model to a cohort, every client trains it, and the server moves it by the mean of what they
changed (B. McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017,
arXiv 1602.05629, Algorithm 1). What a client does with it, what the server does with the answers, which part of the
model is shared, and how a client makes it its own are parameters of :func:`shared_model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms import base
from fedloom.algorithms.base import Cohort, Conversation, Group, Round, Task, conversation
from fedloom.algorithms.client import LocalSGD, NothingToTrainOn, Trained, train
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.flat import FlatModel, Layout
from fedloom.models.predictors import Predictors, predictors_of
from fedloom.settings import Settings

# --- what differs -----------------------------------------------------------------------------------------------------

Train: TypeAlias = Callable[[FlatModel, Group, Tensor, Any], Trained]
"""``(model, group, shared [g, s], settings) -> Trained``, whose ``theta`` is the shared part after training."""

Aggregate: TypeAlias = Callable[[Tensor, Replies[Any], Any], Tensor]
"""``(shared [s], updates, settings) -> shared [s]``."""

Personalize: TypeAlias = Callable[[FlatModel, Group, Tensor, Any], Mapping[str, Tensor] | Predictors]
"""``(model, group, shared [g, s], settings) -> {predictor: θ [g, d]}``, or the predictors where they are no vectors."""


class Averaging(Settings):
    """Keys of ``algorithm`` that every method with a shared model has."""

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
        """Whether the server looks at each update by itself."""
        return self.max_norm is not None or self.trim > 0


class FineTuning(Averaging):
    """Those of methods whose clients run SGD, and make the shared model their own by more of it."""

    local: LocalSGD = Field(default=LocalSGD(steps=50), description="local training in a round")
    personalize_steps: int = Field(default=0, ge=0, description="local SGD steps from the global model to personal")


def local_sgd(model: FlatModel, group: Group, theta: Tensor, s: Any) -> Trained:
    """Plain SGD from the shared model."""
    return train(model, group, theta, s.local)


def mean_update(updates: Replies[Any], s: Averaging) -> Tensor:
    """Σ p_i Δθ_i ``[s]`` over the clients that answered, p_i by examples or uniform; or a robust mean in its place."""
    changes = updates.delta_theta if s.max_norm is None else bounded(updates.delta_theta, s.max_norm)
    if s.trim:
        return trimmed_mean(changes[updates.present], s.trim)
    weights = updates.weights if s.weighting == "examples" else updates.mean_weights
    mean: Tensor = updates.mean(changes, weights)
    return mean


def norms_of(updates: Replies[Any], s: Any) -> dict[str, float]:
    """What a round says of its updates' norms where they have a bound: their median, and how many were larger."""
    if not isinstance(s, Averaging) or s.max_norm is None:
        return {}
    norms = torch.linalg.vector_norm(updates.delta_theta[updates.present], dim=1, dtype=torch.float64)
    return {"update_norm": float(norms.median()), "bounded": float((norms > s.max_norm).sum())}


def bounded(x: Tensor, most: float) -> Tensor:
    """Rows ``[c, s]`` of at most this ℓ2 norm: larger ones are scaled down to it, others are as they were to the bit.

    Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, Can you really backdoor federated learning?, 2019,
    arXiv 1911.07963, §3.
    """
    norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    scale = torch.where(norms > most, most / norms, 1.0)
    found: Tensor = x * scale.to(x.dtype)[:, None]
    return found


def trimmed_mean(x: Tensor, share: float) -> Tensor:
    """Mean ``[s]`` of m rows ``[m, s]`` without the largest and the smallest ⌊share · m⌋ values of each coordinate.

    One value is always left, of an even number two: with a share of a half it is the median. D. Yin, Y. Chen,
    K. Ramchandran, P. Bartlett, Byzantine-robust distributed learning, ICML 2018, arXiv 1803.01498, Definitions 1, 2.
    """
    rows = len(x)
    cut = min(math.floor(share * rows + 1e-9), (rows - 1) // 2)  # 0.29 · 100 is 28.999...
    parts = []
    for columns in torch.split(x, COLUMNS, dim=1):  # what is sorted is copied
        middle = columns.sort(dim=0).values[cut : rows - cut]
        total = torch.zeros_like(middle[0])
        for row in middle:
            total += row
        parts.append(total / len(middle))
    return torch.cat(parts)


COLUMNS = 1 << 16
"""Coordinates of which a trimmed mean is taken at a time."""


def average(theta: Tensor, updates: Replies[Any], s: Any) -> Tensor:
    """θ + lr Σ p_i Δθ_i (:func:`mean_update`)."""
    change: Tensor = s.server_lr * mean_update(updates, s)
    return theta + change


def fine_tune(model: FlatModel, group: Group, theta: Tensor, s: Any) -> dict[str, Tensor]:
    """``personal`` is the shared model after ``personalize_steps`` local steps, ``global`` before."""
    personal = theta
    if s.personalize_steps:
        personal = train(model, group, theta, s.local.lasting(steps=s.personalize_steps), purpose="fine-tune").theta
    return {"personal": personal, "global": theta}


def or_shared_alone(
    model: FlatModel, group: Group, shared: Tensor, make: Callable[[], Mapping[str, Tensor] | Predictors]
) -> Predictors:
    """Return the predictors that ``make`` makes, or ``global`` alone for a client that has nothing to train on.

    Parameters
    ----------
    shared
        ``[g, d]``, what ``global`` is.

    Raises
    ------
    NothingToTrainOn
        If such a client is one of several in the group, which is then served one by one.
    """
    try:
        made = make()
    except NothingToTrainOn:
        if len(group) > 1:
            raise
        made = {"global": shared}
    return predictors_of(model, **made) if isinstance(made, Mapping) else made


def part_of(layout: Layout, shared: str) -> slice:
    """Where ``all``, the ``body`` or the ``head`` lies in θ."""
    return {"all": slice(None), "body": slice(layout.body_size), "head": slice(layout.body_size, None)}[shared]


# --- what travels -----------------------------------------------------------------------------------------------------


class SharedModel(Message):
    """Opens training: the shared model, or the part of it that is shared."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [s]


class Update(Message):
    """What local training did."""

    delta_theta: Tensor = rows(Quantity.MODEL_UPDATE, "s")  # [c, s]
    steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64
    loss: Tensor = rows(Quantity.LOSS, 1)  # [c, 1] float64


class MakeItYours(Message):
    """Opens personalization: the same part of the model."""

    theta: Tensor = broadcast(Quantity.MODEL)  # [s]


# --- the two halves ---------------------------------------------------------------------------------------------------


class SharedModelServer(base.ServerHalf):
    """Keeps the shared model, or its shared part, and moves it by what ``aggregate`` makes of the updates.

    Its parameters by name are those of :func:`shared_model`.
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
        self._part = part if whole else slice(None)  # of what is kept

    def limits(self, examples: int) -> Mapping[str, float]:
        """The method's bounds of an update."""
        return self._bounds(self.settings, examples)

    def train_round(self, round: Round) -> base.Statistics:
        """A cohort trains the shared model."""
        updates = round.sample().send(SharedModel(self.state["theta"]), self.update)
        theta = self.state["theta"].clone()
        theta[self._part] = self.aggregate(theta[self._part], updates, self.settings)
        self.state["theta"] = theta
        statistics = {"client_steps": updates.total(updates.steps), "loss": float(updates.mean(updates.loss))}
        return statistics | norms_of(updates, self.settings)

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the shared model, which the clients make their own."""
        return cohort.send(MakeItYours(self.state["theta"]))


def shared_model(
    name: str,
    settings: type[Settings],
    *,
    titles: Mapping[str, str],
    local: Train = local_sgd,
    aggregate: Aggregate = average,
    personalize: Personalize = fine_tune,
    steps: Callable[[Any, int], int] = lambda s, examples: s.personalize_steps,
    limits: Callable[[Any, int], Mapping[str, float]] = lambda s, examples: s.local.limits(examples),
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
    closed: Callable[[Any], tuple[str, str, str] | None] = lambda settings: None,
    unfit: Callable[[Any, int, int], str | None] = lambda settings, examples, classes: None,
    version: int = 1,
) -> base.Algorithm:
    """Make a method out of what distinguishes it.

    Parameters
    ----------
    titles
        Of its predictors, in the order in which ``personalize`` names them.
    local, aggregate, personalize
        What a client does in a round, what the server makes of the answers, and how a client gets its predictors.
    steps
        ``(settings, train examples) -> int``: SGD steps by which a client gets ``personal``.
    limits
        ``(settings, train examples) -> bounds`` of an update (:meth:`ServerHalf.limits`).
    shared
        ``body``: all but the last linear layer is sent, averaged and checkpointed; the head stays with the client.
        ``head``: the other way round.
    whole
        The server keeps and sends all of θ, the part that is not shared as it was drawn at first: ``local`` and
        ``personalize`` get θ ``[g, d]``, and the former returns the shared part.
    needs_head
        A model of one layer is refused; so it is wherever a part is shared.
    linear_head
        A model whose head is parametrized (weight or spectral normalization) is refused.
    needs_features
        A model without a last layer that has features is refused.
    own_loss
        Whether the method trains with the model's loss. If not, a model that has one of its own is refused.
    by_batch
        Whether it trains by :func:`train`, which keeps the statistics of a model that normalizes by the batch. If not,
        such a model is refused.
    stateful
        Whether ``local`` keeps a state of each client (:meth:`Group.keep`).
    update
        The class of what clients answer; ``Trained.also`` has the fields that :class:`Update` lacks.
    unfit
        ``(settings, train examples, classes among them)`` -> what is wrong with a client that is to train, or None.
    server
        The server half; another where a round is another, or where more than the model is kept.
    """

    def made(settings: Any, task: Task, generator: torch.Generator) -> base.ServerHalf:
        return server(
            settings, task, generator, aggregate=aggregate, bounds=limits, shared=shared, whole=whole, update=update
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

    class Client(base.ClientHalf):
        def __init__(self, settings: Any, task: Task) -> None:
            super().__init__(settings, task)
            self._part = part_of(task.model.layout, shared) if whole else slice(None)  # of what is sent

        @conversation
        def train(self, clients: Group, opening: SharedModel) -> Conversation:
            start = opening.theta.expand(len(clients), -1)
            trained = local(self.task.model, clients, start, self.settings)
            answer = {"delta_theta": trained.theta - start[:, self._part], "steps": trained.steps, "loss": trained.loss}
            yield update(**{**answer, **trained.also})
            return None

        @conversation
        def personalize(self, clients: Group, opening: MakeItYours) -> Predictors:
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
        messages=(SharedModel, update, MakeItYours),
        needs_classes=needs_classes,
        titles=lambda settings: titles,
        closed=closed,
        check_model=check_model,
        unfit=unfit,
        needs_each_update=lambda settings: isinstance(settings, Averaging) and settings.robust,
    )
