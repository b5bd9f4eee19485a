"""Uncertainty and calibration of the predictors of groups of clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.evaluation.moments import summed_mean
from fedloom.evaluation.uncertainty import group_uncertainty
from fedloom.tasks.classification import calibration_errors
from fedloom.tasks.headline import GROUPS

if TYPE_CHECKING:
    from fedloom.evaluation.summary import EvaluationResult


def uncertainties(evaluation: EvaluationResult) -> dict[str, dict[str, float] | None]:
    """Return the uncertainty of ``seen``, ``unseen`` (personal) and ``global``: see ``group_uncertainty``."""
    return {group: _uncertainty(evaluation, group) for group in GROUPS}


def _uncertainty(evaluation: EvaluationResult, group: str) -> dict[str, float] | None:
    predictor, members = _members(evaluation, group)
    if predictor not in evaluation.predictors:
        return None
    p, members = evaluation.predictors.index(predictor), members & evaluation.present
    return group_uncertainty(evaluation.calibration[members, p], evaluation.uncertainty[members, p])


def calibration_of_clients(evaluation: EvaluationResult, group: str) -> float | None:
    """Return the mean calibration error over the clients of ``seen``, ``unseen`` or ``global``."""
    predictor, members = _members(evaluation, group)
    if evaluation.moments is not None:
        return summed_mean(evaluation, predictor, members, "ece")
    errors = calibration_errors(evaluation.calibration[:, evaluation.predictors.index(predictor)])
    errors = errors[members & evaluation.present]
    errors = errors[~errors.isnan()]
    return float(errors.mean()) if len(errors) else None


def _members(evaluation: EvaluationResult, group: str) -> tuple[str, Tensor]:
    """Return the predictor of a group, and its clients ``[n]`` bool."""
    if group == "global":
        return "global", torch.ones_like(evaluation.seen)
    return "personal", evaluation.seen if group == "seen" else ~evaluation.seen
