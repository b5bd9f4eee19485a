"""Inventory of the data that leave a client: announcements, and the messages of methods and evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedloom.algorithms.base import Algorithm
from fedloom.algorithms.sums import SummedFields
from fedloom.data.own import OwnClients, own_manifest
from fedloom.data.spec import Normalization
from fedloom.engine import assemble, run_data
from fedloom.engine.run_data import own_of
from fedloom.engine.sums import sums_part
from fedloom.engine.worker import member_of
from fedloom.errors import ExperimentError, argument
from fedloom.evaluation.group_statistics import summed_shapes
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.experiment import Experiment, OwnData
from fedloom.federation.measuring import InputMoments
from fedloom.messages import Message, Metrics, SummedMetrics


@dataclass(frozen=True)
class DisclosedTensor:
    """Tensor that a client sends in an answer.

    Attributes
    ----------
    message, field
        Name of the message, and of its field.
    quantity
        Meaning of the tensor (``fedloom.messages.Quantity``).
    shape
        Shape for one client: sizes, or their names where the sizes are unknown.
    only_summed
        True if the aggregator learns only the sum over a cohort (``federation.secure_aggregation``).
    """

    message: str
    field: str
    quantity: str
    shape: tuple[int | str, ...]
    only_summed: bool = False

    @property
    def numbers(self) -> int | None:
        """Number of elements; None if unknown."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        return math.prod(sizes) if len(sizes) == len(self.shape) else None


def answers(
    algorithm: Algorithm, sizes: Mapping[str, int] | None = None, sums: SummedFields | None = None
) -> list[DisclosedTensor]:
    """Return the tensors that a method's clients may send during training and personalization.

    Parameters
    ----------
    sizes
        Sizes by their names in shapes, from an experiment's server algorithm; None: keep the names.
    sums
        Secure sums of answers (:meth:`Algorithm.sums`): the fields of these answers are only summed, and fields
        without a sum are not sent. None: the aggregator receives every answer as it is.
    """
    size_names, sum_names = sizes or {}, sums or {}
    return [
        DisclosedTensor(
            cls.__name__,
            field.name,
            str(field.quantity),
            tuple(size_names.get(size, size) if isinstance(size, str) else size for size in field.shape),
            only_summed=cls in sum_names,
        )
        for cls in algorithm.messages
        if cls.fields() and all(field.shape for field in cls.fields())
        for field in cls.fields()
        if cls not in sum_names or field.name in sum_names[cls]
    ]


def moment_tensors(*, only_summed: bool = False) -> list[DisclosedTensor]:
    """Return the tensors that a client sends, once, when asked for the moments of its inputs."""
    answer: type[Message] = InputMoments
    if only_summed:
        answer = sums_part().MomentDigits
    return _tensors(answer, {field.name: field.shape for field in answer.fields()}, only_summed)


def measures(predictors: int, plan: EvaluationPlan, *, only_summed: bool = False) -> list[DisclosedTensor]:
    """Return the tensors that a client sends in an evaluation; if ``only_summed``, with the moments of its metrics."""
    if only_summed:
        return _tensors(SummedMetrics, summed_shapes(plan, predictors), only_summed)
    return _tensors(Metrics, plan.shapes(predictors), only_summed)


def _tensors(
    answer: type[Message], shapes: Mapping[str, tuple[int | str, ...]], only_summed: bool
) -> list[DisclosedTensor]:
    return [
        DisclosedTensor(answer.__name__, field.name, str(field.quantity), shapes[field.name], only_summed)
        for field in answer.fields()
        if shapes[field.name] != (0,)
    ]


def parts_for_clients(experiment: Experiment, clients: OwnClients) -> assemble.RunContext:
    """Return the parts of an experiment for clients with their own data.

    Raise ExperimentError if the experiment has no ``data.own``; DataError if the clients' data do not match it.
    """
    if not isinstance(experiment.data, OwnData):
        raise ExperimentError(
            f"{argument('dry_run')} must have data.own, because {argument('packed')} is given; it has data.dataset.",
            key="experiment",
        )
    own = experiment.data.own
    run_data.check_own(experiment, own, clients)
    unknown = Normalization.identity(own.spec.numbers)  # no shape depends on it
    return assemble.make_parts(experiment, own_manifest(own, clients.entries, experiment.seed, unknown))


def of_experiment(
    experiment: Experiment, parts: assemble.RunContext
) -> tuple[list[DisclosedTensor], list[DisclosedTensor]]:
    """Return :func:`answers` and :func:`measures` of an experiment, with all sizes and with its secure aggregation."""
    predictors = len(parts.client_algorithm().predictors)
    secure = experiment.federation.secure_aggregation is not None
    sums = parts.algorithm.sums(parts.settings) if secure else None
    sizes = parts.server_algorithm().sizes
    return answers(parts.algorithm, sizes, sums), measures(predictors, parts.plan, only_summed=secure)


def announcements(clients: OwnClients, *, class_counts: bool) -> list[dict[str, Any]]:
    """Return each client's announcement to the aggregator."""
    return [asdict(member_of(clients, client, class_counts=class_counts)) for client in clients.cards]


def is_measured(experiment: Experiment | None, clients: OwnClients) -> bool:
    """Return whether the aggregator may ask, once, for the moments of these clients' inputs."""
    if all(name in clients.observers or not card.moments.sum for name, card in clients.cards.items()):
        return False
    own = None if experiment is None else own_of(experiment)
    return own is None or own.normalization == "measured"
