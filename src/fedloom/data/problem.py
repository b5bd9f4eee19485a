"""Problem of a run: the data description that a client needs before it requests a model.

It comes from a server and is untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fedloom.core.words import rounded_up
from fedloom.data.folders import text_fault
from fedloom.data.spec import DataSpec
from fedloom.errors import DataError

LONGEST = 16 * 2**20
"""Maximum characters of a problem."""


@dataclass(frozen=True)
class TrainedPrivately:
    """Differential privacy of the training that a model comes from.

    Attributes
    ----------
    unit, neighbouring
        Unit that is protected (``clients`` or ``examples``), and the relation between neighbouring data sets.
    epsilon, delta
        Privacy parameters toward anyone who sees the model; ``epsilon`` is None if there is no guarantee.
    epsilon_members, epsilon_aggregator
        ε toward the clients of the federation, and toward its aggregator; None if there is no guarantee, or an earlier
        version did not state it.
    noise
        ``secret``, or ``seed`` in a simulation, whose noise protects nobody.
    """

    unit: Literal["clients", "examples"]
    neighbouring: Literal["add-or-remove-one", "replace-one"]
    epsilon: float | None
    delta: float
    noise: Literal["secret", "seed"]
    epsilon_members: float | None = None
    epsilon_aggregator: float | None = None

    @classmethod
    def from_summary(cls, claim: Mapping[str, Any] | None) -> TrainedPrivately | None:
        """Return the guarantee in ``training_privacy`` of ``summary.json``, if any."""
        if claim is None:
            return None
        others = (claim.get(name) or {} for name in ("to_members", "to_aggregator"))
        stated = (claim[name] for name in ("unit", "neighbouring", "epsilon", "delta", "noise"))
        return cls(*stated, *(other.get("epsilon") for other in others))

    def __str__(self) -> str:
        """Return the guarantee as part of a sentence."""
        if self.epsilon is None:
            return "without a privacy guarantee"
        simulated = "; noise from the seed, a simulation" if self.noise == "seed" else ""
        others = ""
        if self.epsilon_members is not None and self.unit == "clients":
            aggregator = (
                "no guarantee" if self.epsilon_aggregator is None else f"ε = {rounded_up(self.epsilon_aggregator)}"
            )
            others = f"; ε = {rounded_up(self.epsilon_members)} toward members, {aggregator} toward the aggregator"
        return f"({rounded_up(self.epsilon)}, {self.delta:g})-differentially private for {self.unit}{others}{simulated}"


@dataclass(frozen=True)
class Problem:
    """Data and clients of a run.

    Attributes
    ----------
    dataset, spec
        As in :class:`~fedloom.data.manifest.Manifest`.
    clients
        Number of the run's own clients.
    constants
        Digests of the tensors of the model that are not sent, by name.
    training_privacy
        Differential privacy of training; None if it is not private, or not finished.
    """

    dataset: str
    spec: DataSpec
    clients: Annotated[int, Field(ge=0)]
    constants: dict[str, str] = field(default_factory=dict)
    training_privacy: TrainedPrivately | None = None

    def to_json(self) -> str:
        """Return the problem as JSON."""
        return _PROBLEM.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """Parse a problem; raise DataError if the text is too long, not JSON, nested too deeply, or inconsistent."""
        if len(text) > LONGEST:
            raise DataError(f"the server's problem description has {len(text):,} characters; the limit is {LONGEST:,}")
        try:
            problem = _PROBLEM.validate_json(text)  # rejects deep nesting itself
        except ValidationError as error:
            raise DataError(f"the server's problem description is damaged: {text_fault(error)}") from None
        if not problem.spec.is_normalized:
            raise DataError("the server's problem description is damaged: spec: the normalization is missing")
        return problem


_PROBLEM = TypeAdapter(Problem)
