"""Names of this room that a run uses, found as ``sums`` of ``fedloom.capabilities`` (:mod:`fedloom.engine.sums`)."""

from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.measuring import MomentDigits, securely_measured_normalization, securely_measuring_side
from fedloom.sums.messages import VOCABULARY
from fedloom.sums.revealed_sums import RevealedSums
from fedloom.sums.summation import Summation
from fedloom.sums.vector import weaker_graph

__all__ = [
    "VOCABULARY",
    "HeldAnswers",
    "MomentDigits",
    "RevealedSums",
    "Summation",
    "securely_measured_normalization",
    "securely_measuring_side",
    "weaker_graph",
]
