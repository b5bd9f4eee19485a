"""Area under the ROC curve: exact for a client, from histograms for several."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.tasks.base import MetricSums, are_whole, mean_defined, ratio

BINS = 64
"""Number of bins of the log-odds of each label."""

WIDTH = 0.25
"""Width of a bin in log-odds; the bins cover -8 to 8, and the outer ones everything beyond."""


def areas(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the area under the ROC curve of each label, ``[n, K], [n, K] bool -> [K]`` float64.

    It equals the Mann-Whitney statistic (Hanley and McNeil 1982); ties count half. It is NaN if all or none are
    positive. No score may be NaN.
    """
    columns = scores.double().T.contiguous()
    sorted_scores = columns.sort(1).values
    below = torch.searchsorted(sorted_scores, columns)
    above = torch.searchsorted(sorted_scores, columns, right=True)
    ranks = (below + above + 1).double() / 2  # of equal scores, the mean of their ranks
    members = positive.T.double()
    positives = members.sum(1)
    negatives = len(scores) - positives
    return ratio((ranks * members).sum(1) - positives * (positives + 1) / 2, positives * negatives)


class Auroc(MetricSums):
    """Macro average of the area under the ROC curve over K labels, or over classes one-vs-rest.

    The sums are a client's exact average and 1 (0 and 0 where no label has both kinds of examples), then the number of
    negative and positive examples of each label in each bin of the log-odds, ``[K, 2, BINS]``.
    With ``of_classes``, predictions are log-probabilities of classes, and targets are classes; else logits, and 0 or 1.
    """

    names = ("auroc",)
    whole_split = True

    def __init__(self, labels: int, *, of_classes: bool) -> None:
        self.labels, self.of_classes = labels, of_classes
        self.size = 2 + labels * 2 * BINS

    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of all examples of a split."""
        scores = predictions.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        if self.of_classes:
            positive = torch.nn.functional.one_hot(y, self.labels).bool()
            odds = scores - torch.log(-torch.expm1(scores.clamp(max=0)))
        else:
            positive, odds = y > 0.5, scores
        bins = (odds / WIDTH + BINS / 2).floor().nan_to_num(nan=0).clamp(0, BINS - 1).long()
        place = (torch.arange(self.labels, device=y.device) * 2 + positive.long()) * BINS + bins
        histogram = torch.bincount(place.flatten(), minlength=self.labels * 2 * BINS).double()
        exact = areas(scores, positive)
        exact = exact[~exact.isnan()]
        head = [float(exact.mean()), 1.0] if len(exact) else [0.0, 0.0]
        return torch.cat([histogram.new_tensor(head), histogram])

    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return the exact average of each client, or that of the histogram, in which a bin's examples are tied."""
        if not pooled:
            return {"auroc": ratio(sums[:, 0], sums[:, 1])}
        negative, positive = sums[:, 2:].reshape(len(sums), self.labels, 2, BINS).unbind(2)
        below = negative.cumsum(-1) - negative
        pairs = (positive * (below + negative / 2)).sum(-1)
        return {"auroc": mean_defined(ratio(pairs, positive.sum(-1) * negative.sum(-1)))}

    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return why the sums are impossible: they do not cover all examples, or the average is above 1."""
        average, is_defined, histogram = sums[0], sums[1], sums[2:]
        if float(is_defined) not in (0.0, 1.0) or not 0 <= float(average) <= float(is_defined):
            return f"an average AUROC of {float(average):g} over {float(is_defined):g} clients"
        totals = histogram.reshape(self.labels, -1).sum(1)
        if not are_whole(histogram) or not ((totals == examples) | (totals == 0)).all():
            return f"a histogram of {float(totals.max()):g} scores of {examples} examples"
        return None
