"""Settings and callbacks of the round loop and of its conversations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedloom.algorithms.base import Algorithm, ClientAlgorithm, ServerAlgorithm
from fedloom.evaluation.plan import EvaluationPlan, EvaluationResult
from fedloom.federation.cohort import Summing
from fedloom.federation.control import Control
from fedloom.federation.monitor import Monitor
from fedloom.federation.private_sums import PrivateSums
from fedloom.privacy.accounting import Release
from fedloom.runs.checkpoint import Best
from fedloom.runs.journal import Attempt

Extra = Callable[[EvaluationResult], dict[str, dict[str, Any]]]
"""Sub-objects that a method adds to metrics.jsonl and summary.json, from its server algorithm's records."""


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the loop, from the experiment."""

    rounds: int | None
    clients_per_round: int
    deadline_s: float
    min_replies: int
    attempts: int
    checkpoint_every_s: float
    evaluate_every: int
    evaluation_cohort: int
    label_mask: bool
    seed: int
    enough: Callable[[int, Best], bool] | None = None
    """Returns whether the rounds may end after this one, given the best one so far; called after each evaluation."""
    measure_last: bool = True
    """True to evaluate the last round."""
    own_steps: tuple[int, ...] = ()
    """Numbers of local steps after which the unseen clients are also measured when training has ended."""
    experiment: str = ""
    """In an open federation: the shared part of the experiment, which may have changed since the run began."""


@dataclass(frozen=True)
class AlgorithmPair:
    """Algorithm of a run, and its evaluation plan; the server algorithm is new, and the client algorithm is not run."""

    algorithm: Algorithm
    server: ServerAlgorithm
    client: ClientAlgorithm
    plan: EvaluationPlan
    summation: Summing | None = None
    """Settings of sums, if the server uses only sums of the answers; else None."""
    noisy_steps: Callable[[int, str], Mapping[Release, int]] | None = None
    """Returns the releases of a client's steps, given its number of training examples and the conversation's purpose;
    None without privacy of examples."""
    private: PrivateSums | None = None
    """Draws and noise of sums over clients; None if clients are not private."""


class Observer(Protocol):
    """Callbacks for run progress."""

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Report a completed round; ``rounds`` is the number to run, None for no limit."""

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Report a failed attempt."""

    def evaluating(self, round: int, done: int, clients: int) -> None:
        """Report how many clients an evaluation has measured so far."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """Report a line written to metrics.jsonl."""


@dataclass(frozen=True)
class LoopHooks:
    """Connections of a loop to the process around it."""

    observer: Observer
    stop: threading.Event = field(default_factory=threading.Event)
    """Set it (from a signal handler) to end the run, with a checkpoint, after the current exchange."""
    after: Callable[[int], None] | None = None
    """Called with each round that has become durable, in the thread that writes checkpoints."""
    monitor: Monitor = field(default_factory=Monitor)
    control: Control | None = None
    """Requests of an operator; without it, the run cannot be paused."""
