"""Evaluation and personalization: conversations with a run's clients outside training; settings of the round loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.algorithms.base import Algorithm, ClientAlgorithm, ServerAlgorithm
from fedloom.core import tracing
from fedloom.core.words import REASON_CHARACTERS, pluralize, printable
from fedloom.data.federated import Manifest
from fedloom.errors import DataError, FedloomError, InterruptedRun, argument
from fedloom.evaluation.group_statistics import summed_shapes
from fedloom.evaluation.measure import implausible
from fedloom.evaluation.plan import EvaluationPlan, EvaluationResult
from fedloom.federation.client_side import after_steps_purpose
from fedloom.federation.cohort import RemoteCohort, RoundConfig, Summing, TooFewReplies
from fedloom.federation.monitor import Control, Monitor
from fedloom.federation.private_sums import PrivateSums
from fedloom.federation.releases import Releases
from fedloom.federation.roster import Roster
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.states import Versions
from fedloom.federation.transport import EVALUATE, TRAIN, Transport
from fedloom.federation.validation import is_bug, learning_rates, out_of_range, place
from fedloom.messages import Message, Metrics, Replies, SummedMetrics, answer_shapes
from fedloom.privacy.accounting import Release
from fedloom.privacy.settings import SMALLEST_SUM
from fedloom.runs.checkpoint import Best, Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Attempt, Journal, Replay

_log = logging.getLogger(__name__)

_GROUPS = ("seen", "unseen")  # rows of an evaluation in sums


Extra = Callable[[EvaluationResult], dict[str, dict[str, Any]]]
"""Sub-objects that a method adds to metrics.jsonl and summary.json, from its server algorithm's records."""


class Evaluator:
    """Measures the clients of a federation at one round, without changing any state.

    ``round``, ``server`` and ``journal`` select the round; by default, the start of a run. The cohorts and losses of
    the journal ``replay`` are repeated, and private answers are recorded in ``releases``.
    """

    def __init__(
        self,
        schedule: LoopConfig,
        pair: AlgorithmPair,
        roster: Roster,
        transport: Transport,
        folder: RunFolder,
        hooks: LoopHooks,
        *,
        replay: Replay | None = None,
        releases: Releases | None = None,
    ) -> None:
        self.schedule = schedule
        self.algorithm, self.server = pair.algorithm, pair.server
        self._pair = pair
        self.roster = roster
        self.transport = transport
        self.folder = folder
        self.observer, self.stop, self.monitor = hooks.observer, hooks.stop, hooks.monitor
        self.replay = replay
        self.predictors, self.plan = pair.client.predictors, pair.plan
        # In a power failure, a checkpoint must not survive without the lines that document it.
        self.checkpoints = Checkpoints(
            folder.checkpoints,
            on_start=lambda: folder.sync("journal.jsonl", "metrics.jsonl"),
            on_write=self.monitor.durable,
            on_end=hooks.after,
        )
        self.journal = Journal(folder)
        self.monitor.counting(lambda client: self.journal.last_round(client))
        self.round = 0
        self._index_roster()
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange")
        self.personalization_payload = (0, 0)
        self.unmeasured: dict[str, str] = {}  # clients that the last evaluation lost -> why
        shapes = {
            **answer_shapes(self.algorithm.messages, self.server.sizes),
            Metrics: self.plan.shapes(len(self.predictors)),
            SummedMetrics: summed_shapes(self.plan, len(self.predictors)),
        }
        summation = pair.summation
        if summation is not None and transport.traffic.up is None:  # clients in this process sign nothing
            summation = summation.in_process()
        self._config = RoundConfig(
            schedule.seed,
            schedule.clients_per_round,
            schedule.deadline_s,
            schedule.min_replies,
            shapes,
            self.stop,
            self._judge,
            self._states if pair.client.stateful else None,
            releases,
            summation,
            noisy_steps=self._noisy_steps if pair.noisy_steps is not None else None,
        )
        self._sums_metrics = pair.summation is not None and pair.summation.covers(SummedMetrics)
        self._scaled = () if pair.summation is None else pair.summation.scaled
        self._rates = learning_rates(self.server.settings)
        self._durable: tuple[int, Best | None] | None = None

    @property
    def manifest(self) -> Manifest:
        """Manifest of the current roster."""
        return self.roster.manifest

    def _index_roster(self) -> None:
        """Look up the sizes of the roster's clients."""
        self._sizes = {entry.id: entry.train for entry in self.manifest.clients}
        self._trains = {entry.id for entry in self.manifest.clients if entry.seen}
        self._held_out = {entry.id: (entry.validation, entry.test) for entry in self.manifest.clients}
        self.monitor.know(self.manifest.clients)

    def evaluate(self) -> EvaluationResult:
        """Personalize and evaluate every client, seen and unseen."""
        return self._evaluate(Attempt(self.round, 0))

    def personalize(self, clients: Sequence[str]) -> dict[str, str]:
        """Hold the ``personalize`` conversation with some clients; return the lost ones with the reasons."""
        attempt = Attempt(self.round, 0)
        with closing(self._measuring(attempt)) as session:
            for start in range(0, len(clients), self.schedule.evaluation_cohort):
                self._personalize(session, session.hold(clients[start : start + self.schedule.evaluation_cohort]))
        return attempt.losses

    def _evaluate(self, attempt: Attempt, steps: int | None = None) -> EvaluationResult:
        """Evaluate every client or, given a number of local steps, the unseen ones after these steps."""
        with tracing.span("evaluation", round=self.round, algorithm=self.algorithm.name):
            recorded = self.replay.evaluation(self.round) if self.replay is not None and steps is None else None
            clients = self._to_measure(recorded, steps)
            session = self._measuring(attempt, recorded, EVALUATE if steps is None else after_steps_purpose(steps))
            if self._sums_metrics:
                session.rules = replace(session.rules, sums_metrics=True)
                return self._evaluate_in_sums(session, clients)
            results = _Measurements(len(clients), len(self.predictors), self.plan)
            size, silence, skipped_count = self.schedule.evaluation_cohort, self.transport.silence, 0
            before_s = silence.waited_s
            for start in range(0, len(clients), size):
                self._check_stop()
                with closing(session.hold(clients[start : start + size])) as cohort:
                    if recorded is None:
                        waited_s = silence.waited_s - before_s
                        skipped_count += cohort.skip(
                            silence.skipped(cohort.clients, waited_s, self.schedule.deadline_s)
                        )
                    results.add(slice(start, start + size), self._personalize(session, cohort), cohort)
                self.observer.evaluating(self.round, min(start + size, len(clients)), len(clients))
        if steps is None:
            self.unmeasured = attempt.losses
        if skipped_count:
            _log.warning(
                "the evaluation after round %d skips %s", self.round, pluralize(skipped_count, "silent client")
            )
        if count := int(results.present.sum()):
            # Per client: the bytes for personalization, without the metrics, which only an evaluation needs.
            self.personalization_payload = (
                attempt.payload_up // count - results.metrics.client_bytes(),
                attempt.payload_down // (len(clients) - skipped_count),
            )
        return EvaluationResult(
            round=self.round,
            clients=tuple(clients),
            seen=torch.tensor([self.manifest.entry(client).seen for client in clients]),
            present=results.present,
            predictors=self.predictors,
            **results.metrics.tensors(),
            plan=self.plan,
            records=results.records,
        )

    def _evaluate_in_sums(self, session: RoundAttempt, clients: Sequence[str]) -> EvaluationResult:
        """Evaluate clients whose metrics are summed securely, the seen and the unseen ones apart."""
        groups = [[client for client in clients if self.manifest.entry(client).seen == seen] for seen in (True, False)]
        results, count = _SummedMeasurements(self.plan, len(self.predictors)), 0
        for row, group in enumerate(groups):
            results.ask(row, len(group))
            if 0 < len(group) < SMALLEST_SUM:
                few = pluralize(len(group), f"{_GROUPS[row]} client")
                with closing(session.hold(group)) as cohort:
                    cohort.lose_all(
                        f"a secure sum needs {SMALLEST_SUM} clients, and there are only {few}: hold out more, or none "
                        "(data.held_out_fraction)"
                    )
                _log.warning("%s cannot be measured: a secure sum needs %d clients", few, SMALLEST_SUM)
                count += len(group)
                continue
            for part in _in_sums(group, self.schedule.evaluation_cohort):
                self._check_stop()
                with closing(session.hold(part)) as cohort:
                    results.add(row, self._personalize(session, cohort))
                count += len(part)
                self.observer.evaluating(self.round, count, len(clients))
        self.unmeasured = session.attempt.losses
        return results.result(self.round, self.predictors)

    def _to_measure(self, recorded: Attempt | None, steps: int | None) -> list[str]:
        """Return the clients to evaluate: the connected ones, only the unseen ones, or those in a replayed journal."""
        if steps is not None:
            return [client for client in self.roster.here() if not self.manifest.entry(client).seen]
        if recorded is not None and not self.roster.fixed:
            return [client for conversation in recorded.conversations for client in conversation.clients]
        return list(self.roster.here())

    def _measuring(self, attempt: Attempt, recorded: Attempt | None = None, purpose: str = EVALUATE) -> RoundAttempt:
        """Return conversations outside training, which need no minimum number of answers."""
        rules = replace(self._config, min_replies=1)
        return RoundAttempt(
            attempt, purpose, self.manifest.roster, self._sizes, self.transport, rules, self._helper, recorded
        )

    def _personalize(self, session: RoundAttempt, cohort: RemoteCohort) -> Replies[Metrics] | None:
        """Hold the conversation; return None if it had no result (the reason is recorded for each lost client)."""
        try:
            return self.server.personalize(cohort)
        except TooFewReplies:
            return None
        except DataError as error:  # the method has no models for these clients
            if error is session.failure:
                raise
            cohort.lose_all(str(error))
            return None
        except Exception as error:
            cohort.lose_all(self._failure(session, error))
            return None

    def _failure(self, session: RoundAttempt, error: Exception) -> str:
        """Return a line that describes a failure of the server algorithm on the answers; its traceback is logged.

        Raises
        ------
        Exception
            The error itself if clients' answers did not cause it: a FedloomError, an error of the transport, or a bug
            in a run whose clients are all in this process and which is not a replay.
        """
        own_clients = self.transport.traffic.up is None and self.replay is None
        if isinstance(error, FedloomError) or error is session.failure or (own_clients and is_bug(error)):
            raise error
        _log.error("the server algorithm of %s failed in round %d", self.algorithm.name, session.number, exc_info=error)
        error_text = printable(f"{type(error).__name__}: {error}", REASON_CHARACTERS)
        return f"{error_text} ({place(error)}); the traceback is in the aggregator's log"

    def _judge(self, client: str, answer: Message) -> str | None:
        """Return why the values of a client's answer are implausible; None if they are plausible."""
        if isinstance(answer, Metrics):
            validation, test = self._held_out[client]
            return implausible(answer, self.plan, validation=validation, test=test)
        bounds = self.server.answer_bounds(self._sizes[client])
        return out_of_range(answer, bounds, self._rates, scaled=self._scaled)

    def _noisy_steps(self, client: str, purpose: str) -> Mapping[Release, int]:
        """Return the releases of a client's noisy steps; clients that train make such steps only in rounds."""
        assert self._pair.noisy_steps is not None
        if purpose != TRAIN and client in self._trains:
            return {}
        return self._pair.noisy_steps(self._sizes[client], purpose)

    def _states(self, clients: Sequence[str]) -> tuple[Versions, ...]:
        """Return the versions that each client starts from now, and would start from at kept checkpoints."""
        rounds = set(self.checkpoints.rounds())
        if self._durable is not None:  # it may not be on the disk yet
            rounds.add(self._durable[0])
        self.journal.needed = rounds

        def versions(client: str) -> Versions:
            needed = (self.journal.version(client, round) for round in rounds)
            start = self.journal.version(client, self.round)
            return Versions(start, frozenset(v for v in needed if v is not None), self.journal.life)

        return tuple(versions(client) for client in clients)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            total = "" if self.schedule.rounds is None else f" of {self.schedule.rounds}"
            raise InterruptedRun(f"stopped after round {self.round}{total}; continue with {argument('resume')}")


class _Measurements:
    """Metrics of the clients of an evaluation, filled cohort by cohort."""

    def __init__(self, clients: int, predictors: int, plan: EvaluationPlan) -> None:
        self.metrics = plan.nothing(clients, predictors)
        self.present = torch.zeros(clients, dtype=torch.bool)
        self.records: dict[str, Tensor] = {}

    def add(self, rows: slice, replies: Replies[Metrics] | None, cohort: RemoteCohort) -> None:
        """Add the replies of a cohort (None: it had no result), and the rows that its server algorithm recorded."""
        if replies is not None:
            for name, tensor in self.metrics.tensors().items():
                tensor[rows] = getattr(replies, name)
            self.present[rows] = replies.present
        for name, values in cohort.records.items():
            if name not in self.records:
                self.records[name] = torch.zeros(len(self.present), *values.shape[1:], dtype=torch.float64)
            self.records[name][rows] = values


class _SummedMeasurements:
    """Sums of the clients' metrics by group, filled cohort by cohort."""

    def __init__(self, plan: EvaluationPlan, predictors: int) -> None:
        self._plan = plan
        self._sums = {
            name: torch.zeros(len(_GROUPS), *shape, dtype=torch.int64 if name == "confusion" else torch.float64)
            for name, shape in summed_shapes(plan, predictors).items()
        }
        self._members = torch.zeros(len(_GROUPS), 2, dtype=torch.int64)

    def ask(self, group: int, clients: int) -> None:
        """Count the clients of a group, measured or not."""
        self._members[group, 0] += clients

    def add(self, group: int, replies: Replies[Any] | None) -> None:
        """Add the sums of a cohort of one group; None if it had no result."""
        if replies is None:
            return
        for name, total in self._sums.items():
            column_sum: Tensor = replies.sum(getattr(replies, name))
            total[group] += column_sum if total.is_floating_point() else column_sum.round().to(total.dtype)
        self._members[group, 1] += int(replies.present.sum())

    def result(self, round: int, predictors: tuple[str, ...]) -> EvaluationResult:
        """Return the evaluation, with a row for each group."""
        return EvaluationResult(
            round=round,
            clients=_GROUPS,
            seen=torch.tensor([True, False]),
            present=(self._members[:, 1] > 0) | (self._members[:, 0] == 0),
            predictors=predictors,
            records={},
            **self._sums,
            plan=self._plan,
            members=self._members,
        )


def _in_sums(clients: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Yield cohorts of about this size, none too small for a secure sum."""
    parts = max(1, min(-(-len(clients) // size), len(clients) // SMALLEST_SUM)) if clients else 0
    for i in range(parts):
        yield clients[i * len(clients) // parts : (i + 1) * len(clients) // parts]


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

    def evaluating(self, round: int, count: int, clients: int) -> None:
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
