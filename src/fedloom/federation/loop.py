"""Round loop: rounds, attempts, evaluations, checkpoints. It is the same for every carrier."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom import tracing
from fedloom.algorithms.base import Algorithm, ClientAlgorithm, ServerAlgorithm, Statistics
from fedloom.data.federated import Manifest
from fedloom.errors import GO_ON, DataError, FedloomError, InterruptedRun, QuorumError, argument
from fedloom.evaluation.measure import implausible, nothing_measured
from fedloom.evaluation.measure import shapes as measured_shapes
from fedloom.evaluation.summary import Communication, Evaluation, metrics_line, validation_score
from fedloom.federation.bugs import is_bug, place
from fedloom.federation.carrier import Carrier
from fedloom.federation.client_side import EVALUATE, after_steps_purpose
from fedloom.federation.cohort import RemoteCohort, RoundAttempt, RoundConfig, TooFewReplies
from fedloom.federation.control import Control
from fedloom.federation.monitor import Monitor
from fedloom.federation.releases import Releases
from fedloom.federation.resumption import Resumption
from fedloom.federation.roster import Change, Roster
from fedloom.federation.states import Versions
from fedloom.federation.validation import absurd, is_finite, learning_rates, to_lower
from fedloom.messages import Message, Metrics, Replies, answer_shapes
from fedloom.runs.checkpoint import Best, Checkpoint, Checkpoints, check_fits
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import DONE, EVALUATED, Attempt, Journal, Replay
from fedloom.words import REASON_CHARACTERS, pluralize, printable

_log = logging.getLogger(__name__)

Extra = Callable[[Evaluation], dict[str, dict[str, Any]]]
"""Sub-objects that a method adds to metrics.jsonl and summary.json, from what its server half recorded."""


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
    """Returns whether the rounds may end after this one, given the best so far; called after each evaluation."""
    measure_last: bool = True
    """Evaluate the last round."""
    own_steps: tuple[int, ...] = ()
    """Numbers of local steps after which the unseen clients are also measured when training has ended."""


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


class Loop:
    """Runs the rounds of one federation.

    Parameters
    ----------
    server
        Freshly made; a resumed run loads its state from the last checkpoint.
    client_half
        Used only for the names of its predictors, and whether clients keep states.
    stop
        Set it (from a signal handler) to end the run after the current exchange, with a checkpoint.
    after
        Called with each round that has become durable, in the thread that writes checkpoints.
    experiment
        In an open federation: the shared part of the experiment, which may have changed since the run began.
    monitor
        Receives the state of the loop.
    control
        Requests of an operator; without it, the run cannot be paused.
    releases
        Record of private answers.
    """

    def __init__(
        self,
        schedule: LoopConfig,
        roster: Roster,
        algorithm: Algorithm,
        server: ServerAlgorithm,
        client_half: ClientAlgorithm,
        carrier: Carrier,
        folder: RunFolder,
        observer: Observer,
        stop: threading.Event,
        extra: Extra,
        replay: Replay | None = None,
        after: Callable[[int], None] | None = None,
        experiment: str = "",
        monitor: Monitor | None = None,
        control: Control | None = None,
        releases: Releases | None = None,
    ) -> None:
        self.schedule = schedule
        self._control = control
        self.monitor = monitor or Monitor()
        self.roster = roster
        self._experiment = experiment
        self.algorithm = algorithm
        self.server = server
        self.carrier = carrier
        self.folder = folder
        self.observer = observer
        self.stop = stop
        self.extra = extra
        self.replay = replay
        self.predictors = client_half.predictors
        # In a power failure, a checkpoint must not survive without the lines that document it.
        self.checkpoints = Checkpoints(
            folder.checkpoints,
            before=lambda: folder.sync("journal.jsonl", "metrics.jsonl"),
            done=self.monitor.durable,
            after=after,
        )
        self.journal = Journal(folder)
        self.monitor.counting(lambda client: self.journal.last_round(client))
        self.best: Best | None = None
        self.round = 0
        self._evaluated = -1
        self._know()
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange")
        self.personalization_payload = (0, 0)
        self.after_steps: dict[int, Evaluation] = {}
        self.unmeasured: dict[str, str] = {}  # clients that the last evaluation lost -> why
        shapes = {
            **answer_shapes(algorithm.messages, server.sizes),
            Metrics: measured_shapes(len(self.predictors), self.manifest.classes),
        }
        self._rules = RoundConfig(
            schedule.seed,
            schedule.clients_per_round,
            schedule.deadline_s,
            schedule.min_replies,
            shapes,
            stop,
            self._judge,
            self._states if client_half.stateful else None,
            releases,
        )
        self._durable: tuple[int, Best | None] | None = None
        self._saved_at = time.monotonic()

    @property
    def manifest(self) -> Manifest:
        """Manifest of the current roster."""
        return self.roster.manifest

    def _know(self) -> None:
        """Look up the sizes of the roster's clients."""
        self._sizes = {entry.id: entry.train for entry in self.manifest.clients}
        self._held_out = {entry.id: (entry.validation, entry.test) for entry in self.manifest.clients}
        self.monitor.know(self.manifest.clients)

    def _settle(self, attempt: Attempt) -> None:
        """Wait for the end of a pause and update the roster; the changes are noted in the attempt or evaluation.

        Raises
        ------
        InterruptedRun
            If the run is stopped while it waits for clients or is paused.
        """
        change = self.roster.settle(attempt.round, evaluating=attempt.attempt == 0, hold=lambda: self._hold(attempt))
        if self.roster.fixed:
            return
        if change != Change():
            attempt.joined, attempt.left = change.as_lines()
            self._know()
            _log.info(
                "%d joined and %d left, %s in the roster",
                len(change.joined), len(change.left), pluralize(len(self.manifest.clients), "client"),
            )  # fmt: skip
        if self._experiment != self.journal.experiment:
            attempt.experiment = self._experiment

    def _hold(self, attempt: Attempt) -> None:
        """Wait for the end of a pause, after making the last round durable and publishing the pause.

        Raises
        ------
        InterruptedRun
            If the run is stopped while it is paused.
        """
        if self._control is None or (pause := self._control.paused) is None:
            return
        started = time.monotonic()
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(pause.since))
        _log.info("paused after round %d, by %s", self.round, pause.by)
        with self.monitor.during("saving"):
            self._save()
            self.checkpoints.again(self.round)
            self.checkpoints.wait()
        with self.monitor.during("paused", f"paused by {pause.by} since {since}"):
            self._control.wait(self.stop)
        self._check_stop()
        _log.info("continuing after round %d", self.round)
        self.checkpoints.again(self.round)
        seconds = time.monotonic() - started + attempt.paused.get("seconds", 0.0)
        attempt.paused = {"by": pause.by, "seconds": seconds}

    def resume(self) -> None:
        """Return to the last durable round; later rounds run again, bit for bit.

        Raises
        ------
        DataError
            If the checkpoint does not fit, or from :meth:`Resumption.find`.
        """
        found = Resumption.find(self.folder, self.checkpoints)
        if found is None:  # nothing was durable
            self.journal = Journal.read(self.folder, upto=-1)
            self.journal.rewind()
            self.folder.rewrite("metrics.jsonl", [])
            return
        check_fits(found.checkpoint, self.server.state, self.algorithm.name, self.algorithm.version)
        self.server.load(found.checkpoint.state)
        self.round, self.best = found.checkpoint.round, found.checkpoint.best
        self._durable = (self.round, self.best)
        self._evaluated = found.evaluated
        self.journal = found.journal
        self.roster.restore(self.journal.members)
        self._know()
        found.rewind(self.folder)
        self.monitor.resume(self.round, found.last, self.checkpoints.written_at(self.round))

    def advance(self) -> None:
        """Run to the last round and leave a checkpoint for another loop to continue from; raises like :meth:`run`."""
        try:
            self._make_rounds()
            self._checkpoint()
        finally:
            self.checkpoints.close()
            self._helper.shutdown()

    def run(self) -> Evaluation:
        """Run to the last round and return its evaluation.

        Raises
        ------
        QuorumError
            If a round failed ``attempts`` times.
        InterruptedRun
            If ``stop`` was set.
        StorageError
            If something could not be written.
        """
        try:
            return self._run()
        except (InterruptedRun, QuorumError):
            self._checkpoint()
            raise
        finally:
            self.checkpoints.close()
            self._helper.shutdown()

    def _run(self) -> Evaluation:
        evaluation = self._make_rounds()
        if evaluation is None or evaluation.round != self.round:  # resumed after the last round
            self._settle(Attempt(self.round, 0))
            self.monitor.enter("evaluating")
            evaluation = self.evaluate()
        self._checkpoint()
        payload = self.personalization_payload
        for steps in self.schedule.own_steps:
            self.monitor.enter("evaluating")
            self.after_steps[steps] = self._evaluate(Attempt(self.round, 0), steps)
        self.personalization_payload = payload
        return evaluation

    def _make_rounds(self) -> Evaluation | None:
        """Run all remaining rounds, and return the last evaluation made on the way."""
        evaluation: Evaluation | None = None
        if self._evaluation_due() and self._evaluated != self.round:
            evaluation = self._evaluate_and_note()
            self._checkpoint()
        while not self._is_over():
            with tracing.span("round", round=self.round + 1, algorithm=self.algorithm.name):
                self._train_round()
            if self._evaluation_due():
                evaluation = self._evaluate_and_note()
                if self.best is not None and self.best.round == self.round:
                    self._checkpoint()
            if time.monotonic() - self._saved_at >= self.schedule.checkpoint_every_s:
                self._checkpoint()
            self._check_stop()
        return evaluation

    def _is_over(self) -> bool:
        """Return whether there are no more rounds to run."""
        s = self.schedule
        if s.rounds is not None and self.round >= s.rounds:
            return True
        if s.enough is None or self.best is None or self._evaluated != self.round:
            return False
        return s.enough(self.round, self.best)

    def evaluate(self) -> Evaluation:
        """Personalize every client, seen and unseen, and have it measure the result. Changes no state."""
        return self._evaluate(Attempt(self.round, 0))

    def _evaluate(self, attempt: Attempt, steps: int | None = None) -> Evaluation:
        with tracing.span("evaluation", round=self.round, algorithm=self.algorithm.name):
            return self._measure(attempt, steps)

    def _measure(self, attempt: Attempt, steps: int | None) -> Evaluation:
        """Measure every client, or, given a number of local steps, the unseen ones after these steps."""
        planned = self.replay.evaluation(self.round) if self.replay is not None and steps is None else None
        clients = list(self.roster.here())
        if planned is not None and not self.roster.fixed:
            clients = [client for conversation in planned.conversations for client in conversation.clients]
        purpose = EVALUATE
        if steps is not None:
            clients = [client for client in clients if not self.manifest.entry(client).seen]
            purpose = after_steps_purpose(steps)
        size = self.schedule.evaluation_cohort
        session = self._measuring(attempt, planned, purpose)
        measured = nothing_measured(len(clients), len(self.predictors), self.manifest.classes)
        present = torch.zeros(len(clients), dtype=torch.bool)
        records: dict[str, Tensor] = {}
        silence, skipped = self.carrier.silence, 0
        before_s = silence.waited_s
        for start in range(0, len(clients), size):
            self._check_stop()
            cohort = session.hold(clients[start : start + size])
            rows = slice(start, start + size)
            if planned is None:
                waited_s = silence.waited_s - before_s
                skipped += cohort.skip(silence.skipped(cohort.clients, waited_s, self.schedule.deadline_s))
            try:
                replies = self._personalize(session, cohort)
                if replies is not None:
                    for name, tensor in measured.tensors().items():
                        tensor[rows] = getattr(replies, name)
                    present[rows] = replies.present
                for name, values in cohort.records.items():
                    kept = records.setdefault(name, torch.zeros(len(clients), *values.shape[1:], dtype=torch.float64))
                    kept[rows] = values
            finally:
                cohort.close()
            self.observer.evaluating(self.round, min(start + size, len(clients)), len(clients))
        if steps is None:
            self.unmeasured = attempt.losses
        if skipped:
            _log.warning("the evaluation after round %d skips %s", self.round, pluralize(skipped, "silent client"))
        answered = int(present.sum())
        if answered:
            # Per client: the bytes for personalization, without the metrics, which only an evaluation needs.
            self.personalization_payload = (
                attempt.payload_up // answered - measured.client_bytes(),
                attempt.payload_down // (len(clients) - skipped),
            )
        return Evaluation(
            round=self.round,
            clients=tuple(clients),
            seen=torch.tensor([self.manifest.entry(client).seen for client in clients]),
            present=present,
            predictors=self.predictors,
            **measured.tensors(),
            records=records,
        )

    def personalize(self, clients: Sequence[str]) -> dict[str, str]:
        """Hold the ``personalize`` conversation with some clients; return those lost, and why."""
        attempt = Attempt(self.round, 0)
        session = self._measuring(attempt)
        try:
            for start in range(0, len(clients), self.schedule.evaluation_cohort):
                self._personalize(session, session.hold(clients[start : start + self.schedule.evaluation_cohort]))
        finally:
            session.close()
        return attempt.losses

    def _personalize(self, session: RoundAttempt, cohort: RemoteCohort) -> Replies[Metrics] | None:
        """Hold the conversation; return None if it had no result, and each client's loss says why."""
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
        """Return a line that describes a failure of the server half on the answers; its traceback is logged.

        Raises
        ------
        Exception
            The error itself if clients' answers did not cause it: a FedloomError, an error of the carrier, or a bug in
            a run whose clients are all in this process and which is not a replay.
        """
        own_clients = self.carrier.traffic.up is None and self.replay is None
        if isinstance(error, FedloomError) or error is session.failure or (own_clients and is_bug(error)):
            raise error
        _log.error("the server half of %s failed in round %d", self.algorithm.name, session.number, exc_info=error)
        what = printable(f"{type(error).__name__}: {error}", REASON_CHARACTERS)
        return f"{what} ({place(error)}), whose traceback is in the log of the aggregator"

    def _judge(self, client: str, answer: Message) -> str | None:
        """Return why the values of a client's answer are implausible; None if they are plausible."""
        if isinstance(answer, Metrics):
            validation, test = self._held_out[client]
            return implausible(answer, validation=validation, test=test)
        return absurd(answer, self.server.update_bounds(self._sizes[client]), learning_rates(self.server.settings))

    def _states(self, clients: Sequence[str]) -> tuple[Versions, ...]:
        """Return the versions that each client starts from now, and would start from at kept checkpoints."""
        kept = set(self.checkpoints.rounds())
        if self._durable is not None:  # it may not be on the disk yet
            kept.add(self._durable[0])
        self.journal.needed = kept

        def versions(client: str) -> Versions:
            needed = (self.journal.version(client, round) for round in kept)
            start = self.journal.version(client, self.round)
            return Versions(start, frozenset(v for v in needed if v is not None), self.journal.life)

        return tuple(versions(client) for client in clients)

    def _measuring(self, attempt: Attempt, planned: Attempt | None = None, purpose: str = EVALUATE) -> RoundAttempt:
        """Return conversations outside training: clients that answer are measured, however few."""
        rules = replace(self._rules, min_replies=1)
        return RoundAttempt(
            attempt, purpose, self.manifest.roster, self._sizes, self.carrier, rules, self._helper, planned
        )

    def _training(self, attempt: Attempt, planned: Attempt | None, lost: Collection[str]) -> RoundAttempt:
        """Return one attempt at a round, with the training clients that are connected; ``lost`` by earlier attempts."""
        roster, rules, groups = self.manifest.roster, self._rules, None
        if not self.roster.fixed:
            here = set(self.roster.here())
            roster = tuple(client for client in roster if client in here)
            rules = replace(rules, clients_per_round=min(rules.clients_per_round, len(roster)))
            groups = partial(self.carrier.silence.groups, least=rules.min_replies, lost=lost)
        return RoundAttempt(attempt, "train", roster, self._sizes, self.carrier, rules, self._helper, planned, groups)

    # --- one round ----------------------------------------------------------------------------------------------------

    def _train_round(self) -> None:
        """Run the next round, in as many attempts as allowed."""
        t = self.round + 1
        planned = self.replay.attempt(t) if self.replay is not None else None
        first = planned.attempt if planned is not None else 1
        lost: set[str] = set()
        number, failures = first, 0
        while failures < self.schedule.attempts:
            attempt, lacks_replies = Attempt(t, number), False
            self._settle(attempt)
            self.monitor.enter("training", doing=t, attempt=number)
            started = time.perf_counter()
            up, down = self.carrier.traffic.up, self.carrier.traffic.down
            refused = dict(self.carrier.refusals.counts)
            session = self._training(attempt, planned, lost)
            before = dict(self.server.state)
            try:
                statistics = self.server.train_round(session)
                self._check_finite(before, {"client_steps": statistics["client_steps"]} | statistics)
                attempt.statistics = statistics
            except (TooFewReplies, FloatingPointError) as error:
                attempt.outcome, lacks_replies = str(error), isinstance(error, TooFewReplies)
                self.server.state = before
            except Exception as error:
                self.server.state = before
                attempt.outcome = self._failure(session, error)
            finally:
                session.close()
            attempt.seconds = time.perf_counter() - started
            attempt.phases["server"] = max(0.0, attempt.seconds - sum(attempt.phases.values()))
            if up is not None and down is not None:
                attempt.wire_up = (self.carrier.traffic.up or 0) - up
                attempt.wire_down = (self.carrier.traffic.down or 0) - down
            counts = dict(self.carrier.refusals.counts).items()  # a copy: counts may change meanwhile
            attempt.refused = {reason: n - refused.get(reason, 0) for reason, n in counts if n > refused.get(reason, 0)}
            self.journal.append(attempt)
            self.monitor.attempted(attempt, counts=attempt.outcome == DONE)
            if attempt.outcome == DONE:
                self.round = t
                if not self.roster.fixed:
                    self.carrier.silence.take_part(attempt.answered)
                self.observer.round_done(attempt, self.schedule.rounds)
                return
            lost.update(attempt.losses)
            number += 1
            failures += not (lacks_replies and self._waits_for_others(attempt))
            self.observer.attempt_failed(attempt, self.schedule.attempts)
            self._check_stop()
        raise QuorumError(
            f"{attempt.outcome} (round {t} failed {pluralize(number - first, 'time')})",
            hint=GO_ON,
        )

    def _waits_for_others(self, attempt: Attempt) -> bool:
        """Record who refused an attempt in an open federation; return whether it does not count yet."""
        if self.roster.fixed:
            return False
        self.carrier.silence.refuse(attempt.losses, attempt.answered)
        return self.roster.waits_for_others(attempt.round)

    def _evaluation_due(self) -> bool:
        s = self.schedule
        if self.round == s.rounds:
            return s.measure_last
        return self.round % s.evaluate_every == 0

    def _evaluate_and_note(self) -> Evaluation:
        started = time.perf_counter()
        attempt = Attempt(self.round, 0, outcome=EVALUATED)
        self._settle(attempt)
        self.monitor.enter("evaluating")
        evaluation = self._evaluate(attempt)
        if not self.roster.fixed or attempt.paused or any(held.lost for held in attempt.conversations):
            attempt.phases.clear()
            self.journal.append(attempt)
        _log.info(
            "evaluated %d clients after round %d in %.2f s",
            len(evaluation.clients),
            self.round,
            time.perf_counter() - started,
        )
        score = validation_score(evaluation, label_mask=self.schedule.label_mask)
        if score is not None and (self.best is None or score > self.best.score):
            self.best = Best(self.round, score)
        line = metrics_line(
            evaluation,
            label_mask=self.schedule.label_mask,
            train_loss=self.journal.train_loss(),
            communication=self.communication(),
            client_steps=self.client_steps(),
            extra=self.extra(evaluation),
        )
        self.folder.append("metrics.jsonl", line)
        self._evaluated = self.round
        self.monitor.evaluated(line)
        self.observer.evaluated(line)
        return evaluation

    def _checkpoint(self) -> None:
        with self.monitor.during("saving"), tracing.span("checkpoint", round=self.round):
            self._save()

    def _save(self) -> None:
        if self._durable == (self.round, self.best):
            self.checkpoints.wait()
            return
        self.server.settle()
        try:
            self._check_finite({}, {})
        except FloatingPointError as error:  # possible in a method that changes the state in place
            raise QuorumError(
                f"{error}: round {self.round} is not kept", hint=f"go on with {argument('resume')}"
            ) from error
        self.checkpoints.save(
            Checkpoint(self.algorithm.name, self.algorithm.version, self.round, self.best, self.server.state)
        )
        self._durable = (self.round, self.best)
        self._saved_at = time.monotonic()

    def _check_finite(self, before: Mapping[str, Tensor], statistics: Statistics) -> None:
        """Look at what a round made of the server's state, which was ``before``, and at what it reports.

        Raises
        ------
        FloatingPointError
            If a tensor that it put into the state is not finite, or one of the statistics; with the keys to lower.
        """
        lower = to_lower(learning_rates(self.server.settings, also=("max_norm",)))
        for name, value in statistics.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"training diverged: {name} of this round's statistics is {value}{lower}")
        for name, tensor in self.server.state.items():
            if tensor is not before.get(name) and tensor.is_floating_point() and not is_finite(tensor):
                raise FloatingPointError(
                    f"training diverged: {name} of the server's state is not finite after this round{lower}"
                )

    def _check_stop(self) -> None:
        if self.stop.is_set():
            of = "" if self.schedule.rounds is None else f" of {self.schedule.rounds}"
            raise InterruptedRun(f"stopped after round {self.round}{of}; go on with {argument('resume')}")

    # --- costs, from the journal --------------------------------------------------------------------------------------

    def communication(self) -> Communication:
        """Return the bytes of all training rounds so far."""
        costs, traffic = self.journal.costs, self.carrier.traffic
        return Communication(
            payload_up=costs.payload_up,
            payload_down=costs.payload_down,
            wire_up=None if traffic.up is None else costs.wire_up,
            wire_down=None if traffic.down is None else costs.wire_down,
        )

    def client_steps(self) -> int:
        """Return the local SGD steps of all training rounds so far."""
        return round(self.journal.costs.client_steps)

    def training_seconds(self) -> float:
        """Return the wall time of all training rounds so far in seconds, including failed attempts."""
        return self.journal.costs.seconds


def vocabulary(algorithm: Algorithm) -> dict[str, type[Message]]:
    """Return all messages that a conversation of this algorithm can contain, by name."""
    return {message.__name__: message for message in (*algorithm.messages, Metrics)}
