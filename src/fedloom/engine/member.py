"""Hook of the optional part ``member``: a member's own policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fedloom.core.plugins import capability
from fedloom.core.urls import is_url
from fedloom.engine.options import WorkerOptions
from fedloom.errors import RefusedError, argument
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.experiment import Experiment
from fedloom.federation.transport import Gate, Guard


class Membership(Gate, Guard, Protocol):
    """A member's policy at work (:class:`fedloom.member.guard.PolicyEnforcer`)."""

    def spent(self) -> tuple[float, float] | None:
        """Return a bound on the largest ε that a client has spent in the run, and its δ; None if it is not known."""

    def close(self) -> None:
        """Let another worker use the member's folder."""

    def check_code(self, text: str) -> None:
        """Raise Declined if an experiment, as JSON, names code that the policy does not allow."""

    def admit(self, experiment: Experiment, sizes: Mapping[str, int]) -> None:
        """Raise Declined if the policy refuses an experiment, or it waits for approval."""

    def check_size(self, size: int) -> None:
        """Raise Declined if the policy refuses a model of so many bytes."""

    def begin(self, plan: EvaluationPlan) -> None:
        """Begin to answer, with these measurements in evaluations."""


class MemberPart(Protocol):
    """Classes and functions of :mod:`fedloom.member.part`, which documents them."""

    PolicyEnforcer: Callable[..., Membership]
    load_policy: Callable[..., Any]
    only_sums_policy: Callable[[], Any]
    check_options: Callable[..., None]
    refusals: Callable[[Any, Experiment], Iterator[str]]
    code_refusals: Callable[[Any, Sequence[str]], Iterator[str]]
    model_refusals: Callable[[Any, Experiment, int], Iterator[str]]


def member_part(user: str) -> MemberPart:
    """Return the part; raise ExperimentError, which names the ``user``, if this installation lacks it."""
    part: MemberPart = capability("member", user)
    return part


def policy_of(options: WorkerOptions) -> Any:
    """Return the policy of a worker; None if it has none. Raise ExperimentError if it is invalid."""
    if options.policy is not None:
        return member_part(argument("policy")).load_policy(options.policy, only_sums=options.only_sums)
    return member_part(argument("only_sums")).only_sums_policy() if options.only_sums else None


def membership_of(options: WorkerOptions, aggregator: str, *, sends_class_counts: bool) -> Membership | None:
    """Return the policy of a worker at work; None if it has none."""
    if (file := policy_of(options)) is None:
        return None
    return member_part(argument("policy")).PolicyEnforcer(
        file, states=_local(options.states), sends_class_counts=sends_class_counts, aggregator=aggregator
    )


def check_allowed(
    options: WorkerOptions, experiment: Experiment | None, size: int | None, *, sends_class_counts: bool
) -> None:
    """Raise ExperimentError if the policy of a worker is invalid, RefusedError if it refuses the experiment.

    ``size`` is that of the experiment's model, in bytes.
    """
    if (file := policy_of(options)) is None:
        return
    part = member_part(argument("policy"))
    part.check_options(file, _local(options.states), sends_class_counts=sends_class_counts)
    if experiment is None or size is None:
        return
    found = [
        *part.code_refusals(file, experiment.code),
        *part.refusals(file, experiment),
        *part.model_refusals(file, experiment, size),
    ]
    if found:
        raise RefusedError("the policy of this worker refuses the experiment:\n  " + "\n  ".join(found))


def _local(states: str | None) -> str | None:
    return None if states is None or is_url(states) else states
