"""Uncertainty and calibration of the predictors of groups of clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.evaluation.moments import summed_mean
from fedloom.evaluation.uncertainty import group_uncertainty
from fedloom.tasks.classification import calibration_errors

if TYPE_CHECKING:
    from fedloom.evaluation.summary import EvaluationResult


def uncertainties(evaluation: EvaluationResult) -> dict[str, dict[str, float] | None]:
    """Return the uncertainty of ``seen``, ``unseen`` (personal) and ``global``: see ``group_uncertainty``."""
    everyone = torch.ones_like(evaluation.seen)
    wanted = {
        "seen": ("personal", evaluation.seen),
        "unseen": ("personal", ~evaluation.seen),
        "global": ("global", everyone),
    }
    return {name: _uncertainty(evaluation, predictor, group) for name, (predictor, group) in wanted.items()}


def calibration_of_clients(evaluation: EvaluationResult, group: str) -> float | None:
    """Return the mean calibration error over the clients of ``seen``, ``unseen`` or ``global``."""
    wanted = {"seen": evaluation.seen, "unseen": ~evaluation.seen}.get(group, torch.ones_like(evaluation.seen))
    if evaluation.moments is not None:
        return summed_mean(evaluation, _predictor_of(group), wanted, "ece")
    errors = calibration_errors(evaluation.calibration[:, evaluation.predictors.index(_predictor_of(group))])
    errors = errors[wanted & evaluation.present]
    errors = errors[~errors.isnan()]
    return float(errors.mean()) if len(errors) else None


def _predictor_of(group: str) -> str:
    return "global" if group == "global" else "personal"


def _uncertainty(evaluation: EvaluationResult, predictor: str, group: Tensor) -> dict[str, float] | None:
    """Return the uncertainty of one predictor over the present clients in ``group`` ``[n]`` bool; None without any."""
    if predictor not in evaluation.predictors:
        return None
    p, members = evaluation.predictors.index(predictor), group & evaluation.present
    return group_uncertainty(evaluation.calibration[members, p], evaluation.uncertainty[members, p])
