"""Settings and callbacks of the round loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedloom.algorithms.base import Algorithm, ClientAlgorithm, ServerAlgorithm
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.evaluation.summary import EvaluationResult
from fedloom.federation.control import Control
from fedloom.federation.monitor import Monitor
from fedloom.federation.private_sums import PrivateSums
from fedloom.federation.summation import Summation
from fedloom.privacy.accounting import Release
from fedloom.runs.checkpoint import Best
from fedloom.runs.journal import Attempt

Extra = Callable[[EvaluationResult], dict[str, dict[str, Any]]]
"""Sub-objects that a method adds to metrics.jsonl and summary.json, from its server algorithm's records."""


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the loop, from the experiment.

    Attributes
    ----------
    enough
        Returns whether the rounds may end after this one, given the best one so far; called after each evaluation.
    measure_last
        Evaluate the last round.
    own_steps
        Numbers of local steps after which the unseen clients are also measured when training has ended.
    experiment
        In an open federation: the shared part of the experiment, which may have changed since the run began.
    """

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
    measure_last: bool = True
    own_steps: tuple[int, ...] = ()
    experiment: str = ""


@dataclass(frozen=True)
class AlgorithmPair:
    """Algorithm of a run, and what is measured; the server algorithm is new, and the client algorithm is not run.

    ``summation`` has the answers of training of which only sums are made; None without them. ``noisy_steps`` returns
    the releases of a client's steps, given its number of training examples and the purpose of the conversation; None
    without privacy of examples. ``private`` has the draws and the noise of sums over clients; None if clients are not
    private.
    """

    algorithm: Algorithm
    server: ServerAlgorithm
    client: ClientAlgorithm
    plan: EvaluationPlan
    summation: Summation | None = None
    noisy_steps: Callable[[int, str], Mapping[Release, int]] | None = None
    private: PrivateSums | None = None


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
    """Connections of a loop to the process around it.

    Attributes
    ----------
    observer
        Receives progress.
    stop
        Set it (from a signal handler) to end the run, with a checkpoint, after the current exchange.
    after
        Called with each round that has become durable, in the thread that writes checkpoints.
    monitor
        Receives the state of the loop.
    control
        Requests of an operator; without it, the run cannot be paused.
    """

    observer: Observer
    stop: threading.Event = field(default_factory=threading.Event)
    after: Callable[[int], None] | None = None
    monitor: Monitor = field(default_factory=Monitor)
    control: Control | None = None
