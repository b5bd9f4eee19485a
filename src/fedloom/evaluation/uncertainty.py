"""Uncertainty of predictors: calibration, predictive entropy, mutual information.

Calibration needs only class probabilities, so every method has it. Mutual information needs a predictor that is a
distribution over networks (papers/003, Appendix B.2); it is zero for one network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

BINS = 15
"""Bins of the highest class probability: bin m of 1 ... 15 is ((m - 1)/15, m/15]."""

EDGES = [m / BINS for m in range(BINS + 1)]
"""Edges of the bins."""

EXAMPLES, CONFIDENCE, RIGHT = range(3)
"""Last axis of calibration: examples in the bin, their summed confidence, and the number predicted correctly."""

ENTROPY, INFORMATION = 1, 2
"""Last axis of uncertainty, after ``EXAMPLES``: summed predictive entropy and mutual information, nats."""


@runtime_checkable
class EnsemblePredictor(Protocol):
    """Predictor that averages the probabilities of several networks."""

    def draws_log_probabilities(self, x: Tensor) -> Tensor:
        """Return each network's log-probabilities, ``[b, ...] -> [S, b, C]``."""


@cache
def is_ensemble(predictor: type) -> bool:
    """Return whether predictors of a class are ensembles; a protocol's own check takes 20 µs each time."""
    return issubclass(predictor, EnsemblePredictor)


def averaged(draws: Tensor) -> Tensor:
    """Return the log of the mean probability, ``[S, b, C] -> [b, C]``."""
    return draws.logsumexp(0) - math.log(len(draws))


def calibration_counts(log_p: Tensor, y: Tensor, client: Tensor | None = None, clients: int = 1) -> Tensor:
    """Count predictions by confidence bin (C. Guo et al., On calibration of modern neural networks, ICML 2017).

    The result is ``[clients * BINS, 3]`` float64 on the CPU: examples, summed confidence, correct predictions.

    Parameters
    ----------
    log_p, y
        ``[b, C]`` log-probabilities, none NaN, and ``[b]`` labels; ties go to the lowest class.
    client
        ``[b]`` number of each example's client on the CPU, below ``clients``; None for one client.
    """
    confidence, predictions = log_p.double().exp().max(1)
    bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    bins = bins.cpu() if client is None else bins.cpu() + BINS * client
    counts = torch.zeros(clients * BINS, 3, dtype=torch.float64)
    values = torch.stack([torch.ones_like(confidence), confidence, (predictions == y).double()], dim=1)
    return counts.index_add_(0, bins, values.cpu())


def entropy(log_p: Tensor) -> Tensor:
    """Return −Σ_c p_c log p_c in nats, ``[..., C] -> [...]``; a class of probability zero adds nothing."""
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def uncertainty_counts(log_p: Tensor, draws: Tensor | None) -> Tensor:
    """Sum entropy and mutual information over examples: ``[3]`` float64 on the CPU, after the number of examples.

    The mutual information between the prediction and the network is H(mean_s p_s) - mean_s H(p_s): the part of the
    entropy due to disagreement between networks.

    Parameters
    ----------
    log_p
        ``[b, C]`` log-probabilities, none NaN.
    draws
        ``[S, b, C]`` log-probabilities of the averaged networks; None for a single network.
    """
    total = entropy(log_p.double())
    information = torch.zeros_like(total) if draws is None else total - entropy(draws.double()).mean(0)
    return torch.stack([total.new_tensor(len(total)), total.sum(), information.clamp(min=0).sum()]).cpu()


def group_uncertainty(calibration: Tensor, uncertainty: Tensor) -> dict[str, float] | None:
    """Return statistics of a group of clients, over all their test examples together; None without examples.

    Given :func:`calibration_counts` ``[m, BINS, 3]`` and :func:`uncertainty_counts` ``[m, 3]``, these are ``ece``, the
    expected calibration error Σ_m (n_m/n) |right_m/n_m - confidence_m/n_m|; and ``entropy`` and ``mutual_information``,
    means in nats.
    """
    bins, sums = calibration.sum(0), uncertainty.sum(0)
    examples = float(sums[EXAMPLES])
    if examples == 0:
        return None
    return {
        "ece": float((bins[:, RIGHT] - bins[:, CONFIDENCE]).abs().sum()) / examples,
        "entropy": float(sums[ENTROPY]) / examples,
        "mutual_information": float(sums[INFORMATION]) / examples,
    }


def calibration_rows(calibration: Tensor) -> list[list[float]] | None:
    """Return ``[m, BINS, 3]`` of a group as rows ``[examples, mean confidence, accuracy]`` per bin; None if empty.

    A bin without examples is ``[0, 0, 0]``.
    """
    bins = calibration.sum(0)
    examples = bins[:, EXAMPLES]
    if not bool(examples.any()):
        return None
    means = bins[:, [CONFIDENCE, RIGHT]] / examples.clamp(min=1)[:, None]
    rows: Sequence[Sequence[float]] = torch.cat([examples[:, None], means], dim=1).tolist()
    return [[int(n), confidence, accuracy] for n, confidence, accuracy in rows]


def client_document(
    previous: Mapping[str, Any] | None,
    round: int,
    *,
    clients: Sequence[str],
    seen: Tensor,
    calibration: Tensor,
    uncertainty: Tensor,
) -> dict[str, Any]:
    """Add a round to the content of ``uncertainty.json``: numbers per client, as in papers/003, Figure 3.

    It has ``edges``, ``clients`` and ``rounds``: the first two evaluated rounds and the last, before training, early in
    it, and at its end. Values are null for a client without predictions. Of the content ``previous`` (None at first),
    rounds from this one on are dropped, so that a resumed run may rewrite them.

    Parameters
    ----------
    clients, seen
        n ids, ``[n]`` bool.
    calibration, uncertainty
        ``[n, BINS, 3]`` and ``[n, 3]`` of the personal predictors; zero for a client that did not answer.
    """
    n = uncertainty[:, EXAMPLES]
    means = (uncertainty / n.clamp(min=1)[:, None]).tolist()
    some = [bool(count) for count in n.tolist()]

    def per_client(values: Sequence[Any]) -> list[Any]:
        return [value if is_present else None for value, is_present in zip(values, some, strict=True)]

    this = {
        "round": round,
        "examples": per_client(calibration[:, :, EXAMPLES].long().tolist()),
        "right": per_client(calibration[:, :, RIGHT].long().tolist()),
        "entropy": per_client([float(f"{mean[ENTROPY]:.6g}") for mean in means]),
        "mutual_information": per_client([float(f"{mean[INFORMATION]:.6g}") for mean in means]),
    }
    earlier = [one for one in previous["rounds"] if one["round"] < round][:2] if previous else []
    return {
        "edges": EDGES,
        "clients": {"ids": list(clients), "seen": seen.bool().tolist()},
        "rounds": [*earlier, this],
    }
