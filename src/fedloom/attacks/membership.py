"""Membership inference: distinguish training examples of a client from its test examples by the loss of a model.

S. Yeom, I. Giacomelli, M. Fredrikson, S. Jha, Privacy risk in machine learning, CSF 2018, arXiv 1709.01604: an example
of low loss is likely a training example. N. Carlini et al., Membership inference attacks from first principles, S&P
2022, arXiv 2112.03570: the true positive rate at a low false positive rate shows more than an average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.core.keyed import make_rng, shuffled
from fedloom.data.federated import ClientData, Split
from fedloom.data.inputs import take
from fedloom.evaluation.measure import LossPredictor
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.models.predictors import Predictor
from fedloom.privacy.audit_bounds import epsilon_of_rates
from fedloom.tasks.base import VALUE_CAP

Scores = NDArray[np.float64]
"""Scores of examples, ``[n]``: the higher, the likelier a member."""

LOW_FPR = 0.01
"""False positive rate at which the true positive rate is reported."""

CURVE_POINTS = 200
"""Maximum number of points of a curve in a document."""

WILSON_Z = 1.96
"""Width of the bounds that choose a threshold, in standard deviations."""


@torch.no_grad()
def example_losses(predictor: Predictor, split: Split, plan: EvaluationPlan, batch_size: int) -> Scores:
    """Return the negative log-likelihood of each example, ``[n]``, or the model's own loss of data without targets.

    Infinite and undefined losses are :data:`~fedloom.tasks.base.VALUE_CAP`.
    """
    parts = [torch.zeros(0, dtype=torch.float64)]
    for start in range(0, len(split), batch_size):
        batch = slice(start, start + batch_size)
        x: Any = take(split.x, batch)
        y = None if split.y is None else split.y[batch]
        if plan.targets.outputs and y is not None:
            task_losses = plan.task.negative_log_likelihood(predictor.predictions(x), y)
        else:
            assert isinstance(predictor, LossPredictor), "a model of data without targets has a loss"
            task_losses = predictor.losses(x, y)
        parts.append(task_losses.double().nan_to_num(nan=VALUE_CAP).clamp(-VALUE_CAP, VALUE_CAP).cpu())
    losses: Scores = torch.cat(parts).numpy()
    return losses


@dataclass(frozen=True, eq=False)
class MemberScores:
    """Scores of a client's training examples, and of its test examples, which no model was trained on."""

    members: Scores
    others: Scores

    @classmethod
    def from_predictor(
        cls, predictor: Predictor, client: ClientData, plan: EvaluationPlan, batch_size: int
    ) -> MemberScores | None:
        """Return minus the losses of a client's examples; None for a client without both kinds."""
        labelled = not plan.targets.outputs or (client.train.y is not None and client.test.y is not None)
        if not labelled or not len(client.train) or not len(client.test):
            return None
        return cls(
            -example_losses(predictor, client.train, plan, batch_size),
            -example_losses(predictor, client.test, plan, batch_size),
        )


@dataclass(frozen=True, eq=False)
class RocCurve:
    """Rates of an attack that calls examples members by a threshold.

    Attributes
    ----------
    thresholds
        ``[k]`` descending: infinity, then each different score; examples with at least this score are called members.
    fpr, tpr
        ``[k]`` ascending, from 0 to 1.
    """

    thresholds: Scores
    fpr: Scores
    tpr: Scores

    @classmethod
    def from_scores(cls, members: Scores, others: Scores) -> RocCurve:
        """Return the curve of two sets of scores, neither empty; equal scores get the same decision."""
        scores = np.concatenate([members, others])
        order = np.argsort(-scores, kind="stable")
        is_member = order < len(members)
        last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
        true, false = np.cumsum(is_member)[last], np.cumsum(~is_member)[last]
        thresholds = np.append(np.inf, scores[order][last])
        return cls(thresholds, np.append(0.0, false / len(others)), np.append(0.0, true / len(members)))

    @property
    def auc(self) -> float:
        """Probability that a member has a higher score than another example, ties counted half."""
        return float(np.sum(np.diff(self.fpr) * (self.tpr[1:] + self.tpr[:-1]) / 2))

    def tpr_at(self, fpr: float) -> float:
        """Return the largest rate of true positives at a rate of false positives of at most ``fpr``."""
        return float(self.tpr[self.fpr <= fpr].max())

    def points(self, most: int = CURVE_POINTS) -> list[list[float]]:
        """Return pairs of (false, true positive rate), at most ``most``, denser at low rates."""
        positions = np.arange(len(self.fpr))
        if len(positions) > most:
            positions = np.unique(np.round((len(positions) - 1) * np.linspace(0, 1, most) ** 2).astype(int))
        return [[round(float(self.fpr[i]), 5), round(float(self.tpr[i]), 5)] for i in positions]


def membership_epsilon(members: Scores, others: Scores, *, delta: float, confidence: float, seed: int) -> float:
    """Return a lower bound on ε from scores of members and others, by a threshold chosen on one half of each.

    The bound counts decisions about the other half, which must be independent: of a single training run they are only
    nearly so (:func:`~fedloom.privacy.audit_bounds.one_run_epsilon` needs no such assumption).
    """
    if min(len(members), len(others)) < 2:
        return 0.0
    first, second = zip(*(_halves(scores, seed, kind) for kind, scores in enumerate((members, others))), strict=True)
    curve = RocCurve.from_scores(*first)
    best = int(np.argmax(_expected_epsilon(curve, len(first[0]), len(first[1]), delta)))
    true, false = (int((scores >= curve.thresholds[best]).sum()) for scores in second)
    return epsilon_of_rates(true, len(second[0]), false, len(second[1]), delta=delta, confidence=confidence)


def _expected_epsilon(curve: RocCurve, members: int, others: int, delta: float) -> Scores:
    """Return the approximate bound at each point of a curve, ``[k]``, by Wilson's bounds of rates.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 1927.
    """

    def wilson(rate: Scores, n: int, side: int) -> Scores:
        spread = WILSON_Z * np.sqrt(rate * (1 - rate) / n + (WILSON_Z / (2 * n)) ** 2)
        rates: Scores = (rate + WILSON_Z**2 / (2 * n) + side * spread) / (1 + WILSON_Z**2 / n)
        return np.clip(rates, 1e-12, 1)

    tpr, fpr = wilson(curve.tpr, members, -1), wilson(curve.fpr, others, 1)
    ratios = ((tpr - delta) / fpr, (1 - fpr - delta) / np.maximum(1 - tpr, 1e-12))
    best: Scores = np.log(np.maximum(np.maximum(*ratios), 1e-12))
    return best


def _halves(scores: Scores, seed: int, kind: int) -> tuple[Scores, Scores]:
    order = shuffled(make_rng(seed, "audit", "halves", kind), len(scores))
    return scores[order[: len(order) // 2]], scores[order[len(order) // 2 :]]


def membership_document(
    found: Mapping[str, MemberScores], *, delta: float, confidence: float, seed: int
) -> dict[str, Any] | None:
    """Return the results of an attack on clients, one threshold for all and one for each; None without clients.

    ``epsilon`` is :func:`membership_epsilon`, null if infinite.
    """
    if not found:
        return None
    members = np.concatenate([scores.members for scores in found.values()])
    others = np.concatenate([scores.others for scores in found.values()])
    curve = RocCurve.from_scores(members, others)
    each = {client: RocCurve.from_scores(scores.members, scores.others).auc for client, scores in found.items()}
    most = max(each, key=lambda client: each[client])
    epsilon = membership_epsilon(members, others, delta=delta, confidence=confidence, seed=seed)
    return {
        "clients": len(found),
        "members": len(members),
        "others": len(others),
        "auc": curve.auc,
        "auc_clients": {"mean": float(np.mean(list(each.values()))), "highest": each[most], "client": most},
        "tpr_at_low_fpr": curve.tpr_at(LOW_FPR),
        "epsilon": epsilon if np.isfinite(epsilon) else None,
        "curve": curve.points(),
    }
