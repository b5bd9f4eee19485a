"""Regression: one or more numbers, or a field of numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.tasks.base import VALUE_CAP, MetricSums, PredictionTask, TargetShape, mean_defined, ratio
from fedloom.tasks.names import METRICS


class Regression(PredictionTask):
    """Regression, trained on standardized targets and measured in their own units."""

    name: Literal["regression"] = Field(default="regression", description="one or more numbers")
    error: Literal["squared", "absolute", "huber"] = Field(
        default="squared",
        description="loss of a number: squared error, absolute error, or squared up to `delta` and linear beyond",
    )
    delta: float = Field(
        default=1.0, gt=0, description="threshold of the Huber loss, in standard deviations of the target"
    )
    target_kind = "regression"
    headline = METRICS["rmse"]

    def output_shape(self, outputs: int, target_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``(k,)``, or the shape of a field."""
        return target_shape if len(target_shape) > 1 else (outputs,)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over the numbers, ``[b, *output_shape], [b, *target_shape] -> [b]``."""
        predicted = outputs.reshape(outputs.shape[0], -1)
        target = y.reshape(predicted.shape).to(predicted.dtype)
        if self.error == "squared":
            return (predicted - target).square().mean(1)
        if self.error == "absolute":
            return (predicted - target).abs().mean(1)
        return F.huber_loss(predicted, target, reduction="none", delta=self.delta).mean(1)

    def negative_log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood of Gaussian targets around the outputs, with standardized deviation 1.

        With the absolute error, targets have a Laplace distribution of scale 1; with the Huber loss, a density
        proportional to exp(-loss).
        """
        factor = 0.5 if self.error == "squared" else 1.0
        return self.loss(outputs, y) * (factor * y[:1].numel())

    def metric_sums(self, target: TargetShape, names: Collection[str] = ()) -> tuple[MetricSums, ...]:
        """Return the sums of errors; the numbers of a field are measured together."""
        field = len(target.shape) > 1
        return (Errors(1 if field else target.outputs, target.std, values=target.outputs if field else 1),)

    def label_input(self, y: Tensor, outputs: int) -> Tensor:
        """Return the standardized numbers, ``[n, k]``."""
        return y.reshape(-1, outputs).float()

    def examples_per_output(self, y: Tensor, outputs: int) -> Tensor:
        """Return the number of examples for each number."""
        return torch.full((outputs,), len(y), dtype=torch.float64)


class Errors(MetricSums):
    """Number of examples; for each number, sums of squared and absolute errors, targets and squared targets.

    The sums are of standardized targets; the metrics are in the targets' own units. A prediction that is NaN or further
    away than √``VALUE_CAP`` counts as that far away. Several numbers have the same weight.

    Parameters
    ----------
    numbers
        k, or 1 for a field.
    std
        Standard deviation of each number; empty if the targets are not standardized.
    values
        Numbers of a field, each of which counts as an example.
    """

    names = ("rmse", "mae", "r2", "mse")

    def __init__(self, numbers: int, std: Sequence[float] = (), *, values: int = 1) -> None:
        self.numbers, self.per_example = numbers, values
        self.size = 1 + 4 * numbers
        self._std = torch.tensor(list(std) or [1.0] * numbers, dtype=torch.float64)

    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of a batch, ``[b, *output_shape], [b, *target_shape] -> [1 + 4k]``."""
        cap = VALUE_CAP**0.5
        target = y.reshape(-1, self.numbers).double().clamp(-cap, cap)
        error = (predictions.reshape(target.shape).double() - target).abs().nan_to_num(nan=cap).clamp(max=cap)
        sums = torch.stack([error.square(), error, target, target.square()]).sum(1)
        return torch.cat([sums.new_tensor([len(target)]), sums.flatten()])

    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return RMSE, MAE and MSE in own units, and R², undefined if the targets are all the same."""
        n = sums[:, :1]
        squared, absolute, total, squares = sums[:, 1:].reshape(len(sums), 4, self.numbers).unbind(1)
        std = self._std.to(sums.device)
        deviation = squares - ratio(total.square(), n)
        deviation = deviation.where(deviation > 1e-12 * squares, deviation.new_zeros(()))
        return {
            "rmse": (ratio(squared, n).sqrt() * std).mean(1),
            "mae": (ratio(absolute, n) * std).mean(1),
            "r2": mean_defined(1 - ratio(squared, deviation)),
            "mse": (ratio(squared, n) * std.square()).mean(1),
        }

    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return why the sums are impossible: wrong numbers of examples, or a violation of Cauchy-Schwarz."""
        n = float(sums[0])
        squared, absolute, total, squares = sums[1:].reshape(4, self.numbers)
        slack = 1 + 1e-6
        if n not in (0.0, float(examples * self.per_example)):
            return f"errors of {n:g} examples, of {examples * self.per_example} in all"
        if min(squared.min(), absolute.min()) < 0 or max(squared.max(), squares.max()) > VALUE_CAP * n * slack:
            return f"summed squares of {float(max(squared.max(), squares.max())):g} of {n:g} examples"
        if (absolute.square() > n * squared * slack).any() or (total.square() > n * squares * slack + 1e-12).any():
            return "sums of errors or targets above what their squares allow"
        return None


TASK = Regression()
