"""Next-token prediction: a token of the vocabulary for each place of a sequence."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.tasks.base import LOSS_CAP, CategoricalTask, MetricSums, TargetShape, are_whole, ratio
from fedloom.tasks.names import IGNORED_TOKEN, METRICS


class NextToken(CategoricalTask):
    """Next-token prediction, trained by the cross-entropy of each place's logits, averaged over a batch's tokens.

    ``y[t]`` is the target of output t: the token after input t. Where the targets equal the inputs, as language models
    expect, :func:`~fedloom.tasks.names.next_tokens` moves them by one place when data are packed.
    """

    name: Literal["next_token"] = Field(default="next_token", description="the next token at each place of a sequence")
    ignore_index: int = Field(
        default=IGNORED_TOKEN,
        description="value of targets that are left out of the loss and of the metrics, as is -100",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="part of each target that is spread evenly over all tokens in training"
    )
    mean_over: Literal["tokens", "sequences"] = Field(
        default="tokens",
        description="mean in the loss of a batch: over all of its targets that count, as in a plain loop, or over its "
        "sequences, each with the mean over its own targets",
    )
    target_kind = "next_token"
    class_axis = -1
    headline = METRICS["perplexity"]

    def output_shape(self, outputs: int, target_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``(T, V)``."""
        return (*target_shape, outputs)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean over the targets that count, ``[b, T, V], [b, T] -> [b]``; 0 if none does."""
        is_counted = _counted(y, self.ignore_index)
        each = F.cross_entropy(
            outputs.flatten(0, 1),
            y.long().where(is_counted, IGNORED_TOKEN).flatten(),
            ignore_index=IGNORED_TOKEN,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        return each.reshape(y.shape).sum(1) / is_counted.sum(1).clamp(min=1)

    def batch_weights(self, y: Tensor, weight: Tensor) -> Tensor:
        """Return weights of sequences by their numbers of targets, unless each sequence counts alike."""
        if self.mean_over == "sequences":
            return weight
        # In float64, so that sequences of one length keep their weights to the bit.
        share = weight.double()
        weights = share * _counted(y, self.ignore_index).flatten(weight.dim()).sum(-1)
        factor = ratio(share.sum(-1, keepdim=True), weights.sum(-1, keepdim=True)).nan_to_num(0.0)
        return (weights * factor).to(weight.dtype)

    def negative_log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum over the targets that count, which are independent given the outputs."""
        return self.loss(outputs, y) * _counted(y, self.ignore_index).sum(1)

    def metric_sums(self, target: TargetShape, names: Collection[str] = ()) -> tuple[MetricSums, ...]:
        """Return the token counts."""
        return (TokenSums(math.prod(target.shape), self.ignore_index),)

    def label_input_size(self, outputs: int, target_shape: tuple[int, ...]) -> int:
        """Return 0: the inputs already contain the tokens."""
        return 0

    def label_input(self, y: Tensor, outputs: int) -> Tensor:
        """Return nothing, ``[n, 0]``."""
        return torch.zeros(len(y), 0, device=y.device)


def _counted(y: Tensor, ignore_index: int) -> Tensor:
    """Return True for targets that count."""
    return (y != ignore_index) & (y != IGNORED_TOKEN)


class TokenSums(MetricSums):
    """Targets that count (not ``ignored``), their summed negative log-likelihood, and the right predictions.

    A sequence has ``length`` T.
    """

    names = ("perplexity", "accuracy")
    size = 3

    def __init__(self, length: int, ignore_index: int) -> None:
        self.length, self.ignored = length, ignore_index

    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of a batch, ``[b, T, V], [b, T] -> [3]``; a NaN prediction is wrong, at ``LOSS_CAP``."""
        is_counted = _counted(y, self.ignored)
        log_p, target = predictions[is_counted], y[is_counted].long()
        loss = -log_p.gather(1, target[:, None]).squeeze(1).double()
        broken = log_p.isnan().any(1)
        loss = loss.masked_fill(broken, LOSS_CAP).clamp(0, LOSS_CAP)
        right = (log_p.argmax(1) == target) & ~broken
        return torch.stack([loss.new_tensor(len(target)), loss.sum(), right.sum().double()])

    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return the perplexity, exp of the mean negative log-likelihood, and the accuracy."""
        tokens, loss, right = sums.unbind(1)
        return {"perplexity": ratio(loss, tokens).exp(), "accuracy": ratio(right, tokens)}

    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return why the sums are impossible; None if they are possible."""
        tokens, loss, right = sums.tolist()
        if not are_whole(sums[[0, 2]]) or tokens > examples * self.length or right > tokens:
            return f"{right:g} right of {tokens:g} tokens, of {examples} sequences of {self.length}"
        if not 0 <= loss <= LOSS_CAP * tokens * (1 + 1e-6):
            return f"a summed loss of {loss:g} of {tokens:g} tokens"
        return None


TASK = NextToken()
