"""Contract of a prediction task, the sums from which its metrics follow, and the task of data without targets."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.settings import Settings
from fedloom.tasks.names import KINDS, METRICS, Headline, TargetKind, TaskName


class MetricSums(ABC):
    """Sums that a client computes over the examples of a split; the metrics of a client, or of several, follow.

    Sums are added over batches and over clients. ``pooled`` values are those of all examples together.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics."""

    whole_split: ClassVar[bool] = False
    """True if the sums are computed from all examples of a client's split at once, not batch by batch."""

    size: int
    """Number of sums."""

    @property
    def metrics(self) -> tuple[Headline, ...]:
        """Metrics that follow from the sums."""
        return tuple(METRICS[name] for name in self.names)

    @abstractmethod
    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of a batch, ``[b, *output_shape], [b, *target_shape] -> [size]`` float64, all finite."""

    @abstractmethod
    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return metrics by name, ``[m, size] -> [m]`` each, NaN where undefined; ``pooled`` sums are over clients."""

    def of_clients(self, predictions: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the sums of g clients, ``[g, size]``, whose examples are concatenated in these sizes."""
        parts = zip(torch.split(predictions, list(sizes)), torch.split(y, list(sizes)), strict=True)
        return torch.stack([self.of(*part).cpu() for part in parts])

    @abstractmethod
    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return why a client cannot have measured these sums ``[size]`` on so many examples; None if it can."""


def are_whole(counts: Tensor) -> bool:
    """Return True if all numbers are whole and nonnegative."""
    return bool(((counts >= 0) & (counts == counts.round())).all())


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a quotient, NaN where the denominator is 0."""
    return numerator / denominator.where(denominator != 0, denominator.new_tensor(float("nan")))


def mean_defined(values: Tensor) -> Tensor:
    """Return the mean over the last axis of the values that are not NaN; NaN without any."""
    return values.nanmean(-1)


CORRECT, TOTAL, LOSS = range(3)
"""Last axis of counts: correct predictions, examples, summed loss."""

LOSS_CAP = -math.log(torch.finfo(torch.float32).tiny)
"""Maximum negative log-likelihood, in nats (87.34), of a target of probability zero, so that sums are finite."""

VALUE_CAP = 1e30
"""Maximum loss, or squared error, of one example where no probability bounds it."""


Weights: TypeAlias = tuple[Annotated[float, Field(ge=0)], ...]
"""Weights of classes or labels."""


class Counts(NamedTuple):
    """Measurements of m clients on one split that are not part of a task's sums.

    Attributes
    ----------
    counts
        ``[m, 3]`` float64: ``CORRECT``, ``TOTAL``, ``LOSS``.
    confusion
        ``[m, C, C]`` int64 for classes, else ``[m, 0, 0]``: examples by class (row) and predicted class.
    calibration
        ``[m, BINS, 3]`` float64: examples, summed confidence and correct predictions by bin of confidence.
    """

    counts: Tensor
    confusion: Tensor
    calibration: Tensor


class TargetShape(NamedTuple):
    """Shape and unit of the targets of a data set.

    Attributes
    ----------
    outputs
        K: classes, labels, numbers, classes of a pixel, or tokens of the vocabulary.
    shape
        Shape of one target.
    std
        Standard deviation of each number, the divisor in regression; empty for other tasks.
    """

    outputs: int
    shape: tuple[int, ...] = ()
    std: tuple[float, ...] = ()


class PredictionTask(Settings):
    """Keys of ``task``: the targets of the models, their loss and their metrics.

    K is the number of outputs: classes, labels, numbers, classes of a pixel, or tokens of the vocabulary. *Outputs* of
    a model, ``[b, *output_shape]``, are what its loss takes: logits, or numbers. *Predictions* have the same shape, are
    outputs as well, and can be averaged over models: log-probabilities of classes, logits of labels, or numbers.
    """

    name: str
    target_kind: ClassVar[TaskName]
    """Kind of targets, as data sets name it; the kind of FedLoom's own tasks is their name."""
    headline: ClassVar[Headline]
    optional: ClassVar[tuple[str, ...]] = ()
    """Metrics that are computed only if an experiment requests them."""
    class_axis: ClassVar[int | None] = None
    """Axis of a batch of outputs along which the loss takes a softmax; None if it takes none."""

    def output_shape(self, outputs: int, target_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a model's output for one example, given K and the shape of one target; default (K,)."""
        del target_shape
        return (outputs,)

    @abstractmethod
    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example, ``[b, *output_shape], [b, *target_shape] -> [b]``."""

    def batch_weights(self, y: Tensor, weight: Tensor) -> Tensor:
        """Return the weights of the losses of a batch, ``[..., b]``, given those by which its examples count alike.

        The loss of a batch is the weighted sum. Padding has weight 0. Weights depend on targets where the loss is a
        mean of more than examples, such as of all tokens of a batch.
        """
        del y
        return weight

    def negative_log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return -log p(y | x) of each example up to a constant, shapes as in :meth:`loss`, by default the loss."""
        return self.loss(outputs, y)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return predictions, given a model's outputs, of the same shape."""
        return outputs

    def probabilities(self, predictions: Tensor) -> Tensor:
        """Return probabilities, or numbers, given predictions, of the same shape."""
        return predictions

    def combine(self, draws: Tensor) -> Tensor:
        """Return the predictions of an ensemble, ``[S, b, *output_shape] -> [b, *output_shape]``."""
        return draws.mean(0)

    @abstractmethod
    def metric_sums(self, target: TargetShape, names: Collection[str] = ()) -> tuple[MetricSums, ...]:
        """Return the sums that a client computes, given the optional metrics that an experiment requests."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that need no sums; the headline comes first."""
        return ()

    def metrics_of_counts(self, counts: Counts) -> dict[str, Tensor]:
        """Return :attr:`metrics` of m clients, ``[m]`` each, NaN where undefined."""
        del counts
        return {}

    def setting_fault(self, outputs: int) -> str | None:
        """Return why the settings do not fit K outputs; None if they do."""
        del outputs
        return None

    def label_input_size(self, outputs: int, target_shape: tuple[int, ...]) -> int:
        """Return the length L of a target as an input of a network; default K."""
        del target_shape
        return outputs

    @abstractmethod
    def label_input(self, y: Tensor, outputs: int) -> Tensor:
        """Return targets as inputs of a network, ``[n, *target_shape] -> [n, L]`` float32."""

    def examples_per_output(self, y: Tensor, outputs: int) -> Tensor:
        """Return the number of examples for each output, ``[n, *target_shape] -> [K]`` float64: by class or label."""
        return self.label_input(y, outputs).double().sum(0)

    @property
    def kind(self) -> TargetKind:
        """Properties of the targets."""
        return KINDS[self.target_kind]

    def trial_targets(self, rows: int, outputs: int, target_shape: tuple[int, ...], *, raw: bool = False) -> Tensor:
        """Return targets that data with K outputs could have, ``[rows, *target_shape]``, for trying a model.

        Numbers are standardized, or ``raw``: 0 or 1, which counts, events and measurements can be.
        """
        generator, shape = torch.Generator().manual_seed(0), (rows, *target_shape)
        if self.kind.is_class:
            return torch.arange(rows) % outputs
        if self.kind.is_number and not raw:
            return torch.randn(shape, generator=generator)
        if self.kind.is_binary or self.kind.is_number:
            return torch.randint(2, shape, generator=generator).float()
        return torch.randint(outputs, shape, generator=generator)

    def has_binary_form(self, outputs: int) -> bool:
        """Return True if one logit z may stand for the two logits [0, z], whose cross-entropy is that of a sigmoid."""
        return outputs == 2 and (self.kind.is_class or self.kind.like == "plane")

    def sums_to_one(self, outputs: Tensor) -> bool:
        """Return True if outputs are nonnegative and sum to one over the classes, as after a softmax."""
        axis = self.class_axis
        if axis is None or outputs.shape[axis] < 2:
            return False
        return bool((outputs >= 0).all() and ((outputs.sum(axis) - 1).abs() < 1e-4).all())


class CategoricalTask(PredictionTask):
    """Task whose outputs are logits of classes along one axis; predictions are log-probabilities of the same shape."""

    class_axis: ClassVar[int | None] = 1

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return log-probabilities, ``[b, *output_shape]``."""
        assert self.class_axis is not None
        return F.log_softmax(outputs, dim=self.class_axis)

    def probabilities(self, predictions: Tensor) -> Tensor:
        """Return probabilities, ``[b, *output_shape]``."""
        return predictions.exp()

    def combine(self, draws: Tensor) -> Tensor:
        """Return the log of the mean probabilities, ``[S, b, *output_shape] -> [b, *output_shape]``."""
        return draws.logsumexp(0) - math.log(len(draws))


def weights_fault(key: str, weights: Sequence[float] | None, outputs: int) -> str | None:
    """Return why weights of classes or labels, settings of a task, do not fit K of them; None if they do."""
    if weights is None or len(weights) == outputs:
        return None
    return f"task.{key} has {len(weights)} numbers, but there are {outputs} outputs; give one number for each"


def as_weights(weights: Sequence[float] | None, like: Tensor) -> Tensor | None:
    """Return weights as a tensor with the type and on the device of another."""
    return None if weights is None else torch.tensor(weights, dtype=like.dtype, device=like.device)


class OwnLoss(PredictionTask):
    """Task of data without classes and targets: the model's own loss; no experiment names it."""

    name: Literal["own_loss"] = Field(default="own_loss", description="the loss that the model defines")
    target_kind = "classification"
    headline = METRICS["loss"]

    def output_shape(self, outputs: int, target_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return an empty shape: outputs have no meaning."""
        return ()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Raise TypeError: only the model has a loss."""
        raise TypeError("data without targets need a model that defines its loss")

    def metric_sums(self, target: TargetShape, names: Collection[str] = ()) -> tuple[MetricSums, ...]:
        """Return nothing."""
        return ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the loss alone."""
        return ("loss",)

    def metrics_of_counts(self, counts: Counts) -> dict[str, Tensor]:
        """Return the mean loss."""
        return {"loss": ratio(counts.counts[:, LOSS], counts.counts[:, TOTAL])}

    def label_input_size(self, outputs: int, target_shape: tuple[int, ...]) -> int:
        """Return 0."""
        return 0

    def label_input(self, y: Tensor, outputs: int) -> Tensor:
        """Return nothing, ``[n, 0]``."""
        return torch.zeros(len(y), 0, device=y.device)


OWN_LOSS = OwnLoss()
