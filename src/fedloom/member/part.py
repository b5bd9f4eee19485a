"""Names of this room that a worker uses, found as ``member`` of ``fedloom.capabilities`` (``engine.member``)."""

from fedloom.member.cockpit import Cockpit
from fedloom.member.guard import PolicyEnforcer, check_options, code_refusals, model_refusals, refusals
from fedloom.member.policy import load_policy, only_sums_policy

__all__ = [
    "Cockpit",
    "PolicyEnforcer",
    "check_options",
    "code_refusals",
    "load_policy",
    "model_refusals",
    "only_sums_policy",
    "refusals",
]
