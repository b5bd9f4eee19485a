"""Request for the model of a client that took no part in a run, with its privacy parameters."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.home import expanded
from fedloom.core.urls import is_url
from fedloom.errors import DataError, ExperimentError, argument

if TYPE_CHECKING:
    from fedloom.data.newcomer import Newcomer
    from fedloom.data.problem import Problem
    from fedloom.engine.assemble import RunContext
    from fedloom.experiment import Experiment
    from fedloom.security.options import ClientOptions

CLIENT = "newcomer"
"""Client id used when the caller gives none."""

DELTA = 1e-5
"""Default δ where only ε is given."""


@dataclass(frozen=True, eq=False)
class PersonalizationRequest:
    """Arguments of :func:`fedloom.personalize`, which describes them."""

    where: str
    x: Any = None
    y: Any = None
    _: KW_ONLY
    data: str | Path | None = None
    client: str | None = None
    checkpoint: str | int = "last"
    predictor: str = "personal"
    timeout_s: float = 60.0
    credentials: str | Path | None = None
    token: str | None = None
    insecure: bool = False
    epsilon: float | None = None
    delta: float | None = None
    clip: float | None = None
    ledger: str | Path | None = None
    budget: float | None = None

    def client_options(self) -> ClientOptions:
        """Return the credentials for a server; those not given are taken from the environment.

        Raise ExperimentError if the folder has no credentials; RefusedError if the token is malformed.
        """
        from fedloom.security.options import ClientOptions
        from fedloom.security.tokens import checked_token

        options = ClientOptions.from_folder(
            None if self.credentials is None else expanded(self.credentials), insecure=self.insecure
        )
        if self.token is None:
            return options
        return replace(options, token_file=None, token=checked_token(self.token, "token"))

    def newcomer(self, problem: Problem, e: Experiment) -> Newcomer:
        """Return the client's data, checked against the run's problem.

        Raise DataError if the data do not meet the requirements; ExperimentError if they are given twice or not at all.
        """
        from fedloom.data.newcomer import Newcomer
        from fedloom.experiment import OwnData

        features = e.data.own.features if isinstance(e.data, OwnData) else None
        if (self.x is None) is (self.data is None):
            given_state = "neither is given" if self.x is None else "both are given"
            raise ExperimentError(f"Give either x or a packed folder ({argument('data')}): {given_state}.", key="data")
        if not problem.spec.outputs:
            raise DataError("The run's data have no targets, so its models make no predictions.")
        if self.data is None:
            return Newcomer.from_arrays(self.client or CLIENT, self.x, self.y, problem, features)
        if self.y is not None or self.client is not None:
            key = "client" if self.y is None else "y"
            raise ExperimentError(f"{key} cannot be combined with a packed folder, which contains it.", key=key)
        return Newcomer.from_folder(expanded(self.data), problem, features)

    def check_privacy(self) -> None:
        """Raise ExperimentError, with the invalid argument, unless ε, δ, C, ledger and budget form a valid request."""
        from fedloom.privacy.gaussian_mechanism import MAX_DELTA

        for name, other in (("budget", "ledger"), ("delta", "epsilon"), ("clip", "epsilon")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                value = getattr(self, name)
                raise ExperimentError(f"{argument(name)} needs {argument(other)}.", key=name, found=value)
        for name in ("budget", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                message = f"{argument(name)} must be a finite number above 0 (got {value})."
                raise ExperimentError(message, key=name, found=value)
        if self.epsilon is not None and not self.epsilon > 0:
            message = f"{argument('epsilon')} must be above 0; inf adds no noise (got {self.epsilon})."
            raise ExperimentError(message, key="epsilon", found=self.epsilon)
        if self.delta is not None and not 0 < self.delta <= MAX_DELTA:
            message = f"{argument('delta')} must be above 0 and at most {MAX_DELTA:g} (got {self.delta:g})."
            raise ExperimentError(message, key="delta", found=self.delta)

    def check_delta(self, examples: int) -> None:
        """Raise ExperimentError unless δ is below 1/n, n being the number of training examples.

        Publishing one of n examples, chosen at random, is (0, 1/n)-differentially private.
        """
        delta = DELTA if self.delta is None else self.delta
        if self.epsilon is not None and math.isfinite(self.epsilon) and delta * examples >= 1:
            raise ExperimentError(
                f"{argument('delta')} must be below 1/n for n = {examples} training examples, {1 / examples:.3g} (got "
                f"{delta:g}); a larger one could disclose a whole example.",
                key="delta",
                found=delta,
                hint=f"set {argument('delta')} to {10 ** -math.ceil(math.log10(examples) + 1):g} or less",
            )

    def private(self, parts: RunContext) -> RunContext:
        """Return the parts of a run for a client that adds the requested noise to its answer.

        Raise ExperimentError if the method has no answer to add noise to, or C is not given.
        """
        from fedloom.algorithms.base import available, find_algorithm
        from fedloom.privacy.gaussian_mechanism import noise_multiplier

        if self.epsilon is None:
            return parts
        method, e = parts.algorithm, parts.experiment
        if not method.answers_privately:
            able = ", ".join(name for name in available() if find_algorithm(name).answers_privately)
            raise ExperimentError(
                f"{argument('epsilon')} is for methods with a descriptor to add noise to ({able}); the run's is "
                f"{method.name}.",
                key="epsilon",
                found=self.epsilon,
            )
        if math.isinf(self.epsilon) and self.clip is None and method.privacy(parts.settings) is None:
            return parts
        delta = DELTA if self.delta is None else self.delta
        settings = method.private(parts.settings, self.clip, noise_multiplier(self.epsilon, delta), delta)
        choice = e.algorithm.model_copy(update={"settings": settings})
        return replace(parts, experiment=e.model_copy(update={"algorithm": choice}))


def is_run(where: str) -> bool:
    """Return whether ``where`` is a run (an existing folder or a URL) rather than an address."""
    return is_url(where) or expanded(where).is_dir()
