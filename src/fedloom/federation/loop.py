"""Round loop: rounds, attempts, evaluations, checkpoints. It is the same for every transport."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from fedloom.algorithms.base import Algorithm, Statistics
from fedloom.core import tracing
from fedloom.core.words import pluralize
from fedloom.errors import GO_ON, InterruptedRun, QuorumError, argument
from fedloom.evaluation.plan import EvaluationResult
from fedloom.evaluation.summary import Communication, line_score, metrics_line
from fedloom.federation.activity import PrivacySpent
from fedloom.federation.cohort import TooFewReplies
from fedloom.federation.evaluator import AlgorithmPair, Evaluator, Extra, LoopConfig, LoopHooks
from fedloom.federation.releases import BudgetSpent, Releases
from fedloom.federation.resumption import Resumption
from fedloom.federation.roster import Change, Roster
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.transport import TRAIN, Transport
from fedloom.federation.validation import is_finite, learning_rates, to_lower
from fedloom.messages import Message, Metrics, SummedMetrics
from fedloom.privacy.claim import readings_of
from fedloom.runs.checkpoint import Best, Checkpoint, check_fits
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import BURNT, DONE, EVALUATED, SPENT, Attempt, Journal, Replay

_log = logging.getLogger(__name__)


class Loop(Evaluator):
    """Runs the rounds of one federation.

    The server algorithm is new; a resumed run loads its state from the last checkpoint (:meth:`resume`). ``extra``
    returns the additions of the method to a line of metrics.jsonl.
    """

    def __init__(
        self,
        schedule: LoopConfig,
        pair: AlgorithmPair,
        roster: Roster,
        transport: Transport,
        folder: RunFolder,
        hooks: LoopHooks,
        extra: Extra,
        *,
        replay: Replay | None = None,
        releases: Releases | None = None,
    ) -> None:
        super().__init__(schedule, pair, roster, transport, folder, hooks, replay=replay, releases=releases)
        self._control = hooks.control
        self._private = pair.private
        self._config = replace(self._config, private=pair.private)
        self.extra = extra
        self.best: Best | None = None
        self.ended_by: Literal["rounds", "until", "budget"] | None = None
        """Reason for which the rounds ended; None before their end."""
        self._evaluated = -1
        self._burnt = 0  # rounds in a row that were left out
        self._accounted = (0.0, 0.0)  # end of the last accounting of privacy, and seconds that it took
        self.after_steps: dict[int, EvaluationResult] = {}
        self._saved_at = time.monotonic()

    def _settle(self, attempt: Attempt) -> None:
        """Wait for the end of a pause and update the roster; the changes are recorded in the attempt or evaluation.

        Raise InterruptedRun if the run is stopped while it waits for clients or is paused.
        """
        change = self.roster.settle(attempt.round, evaluating=attempt.attempt == 0, hold=lambda: self._hold(attempt))
        if self.roster.fixed:
            return
        if change != Change():
            attempt.joined, attempt.left = change.as_lines()
            self._index_roster()
            _log.info(
                "%d joined and %d left; %s in the roster",
                len(change.joined), len(change.left), pluralize(len(self.manifest.clients), "client"),
            )  # fmt: skip
        if self.schedule.experiment != self.journal.experiment:
            attempt.experiment = self.schedule.experiment

    def _hold(self, attempt: Attempt) -> None:
        """Wait for the end of a pause, after making the last round durable and publishing the pause.

        Raise InterruptedRun if the run is stopped while it is paused.
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

        Raise DataError if the checkpoint does not fit, or from :meth:`Resumption.find`.
        """
        resumption = Resumption.find(self.folder, self.checkpoints)
        if resumption is None:  # nothing was durable
            self.journal = Journal.read(self.folder, upto=-1)
            self.journal.rewind()
            self.folder.rewrite("metrics.jsonl", [])
            return
        check_fits(resumption.checkpoint, self.server.state, self.algorithm.name, self.algorithm.version)
        self.server.load(resumption.checkpoint.state)
        if self._private is not None:
            self._private.load(resumption.checkpoint.federation)
        self.round, self.best = resumption.checkpoint.round, resumption.checkpoint.best
        self._durable = (self.round, self.best)
        self._evaluated = resumption.evaluated
        self.journal = resumption.journal
        self.roster.restore(self.journal.members)
        self._index_roster()
        resumption.rewind(self.folder)
        best_round = None if self.best is None else self.best.round
        self.monitor.resume(self.round, resumption.last, self.checkpoints.written_at(self.round), best_round)

    def rehearse(self, rounds: int) -> None:
        """Run the next rounds without evaluations and checkpoints, to measure their cost; raises like :meth:`run`."""
        for _ in range(rounds):
            self._train_round()

    def advance(self) -> None:
        """Run to the last round and leave a checkpoint for another loop to continue from; raises like :meth:`run`."""
        try:
            self._make_rounds()
            self._checkpoint()
        finally:
            self.checkpoints.close()
            self._helper.shutdown()

    def run(self) -> EvaluationResult:
        """Run to the last round and return its evaluation.

        Raise QuorumError if a round failed ``attempts`` times; InterruptedRun if ``stop`` was set; StorageError if
        something could not be written.
        """
        try:
            return self._run()
        except (InterruptedRun, QuorumError):
            self._checkpoint()
            raise
        finally:
            self.checkpoints.close()
            self._helper.shutdown()

    def _run(self) -> EvaluationResult:
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

    def _make_rounds(self) -> EvaluationResult | None:
        """Run all remaining rounds, and return the last evaluation."""
        evaluation: EvaluationResult | None = None
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
        if self.ended_by == "budget" and self._evaluated != self.round:
            evaluation = self._evaluate_and_note()
        return evaluation

    def _is_over(self) -> bool:
        """Return whether there are no more rounds to run."""
        s = self.schedule
        if self.ended_by is not None:
            return True
        if s.rounds is not None and self.round >= s.rounds:
            self.ended_by = "rounds"
        elif s.enough is not None and self.best is not None and self._evaluated == self.round:
            self.ended_by = "until" if s.enough(self.round, self.best) else None
        return self.ended_by is not None

    def _training(self, attempt: Attempt, recorded: Attempt | None, clients_lost: Collection[str]) -> RoundAttempt:
        """Return an attempt at a round with the connected training clients; earlier attempts lost some."""
        roster, rules, groups = self.manifest.roster, self._config, None
        if not self.roster.fixed:
            available = set(self.roster.here())
            roster = tuple(client for client in roster if client in available)
            rules = replace(rules, clients_per_round=min(rules.clients_per_round, len(roster)))
            if self._private is None:  # private draws must not depend on the clients' behaviour
                groups = partial(self.transport.silence.groups, least=rules.min_replies, clients_lost=clients_lost)
        if self._private is not None and self._private.is_poisson:
            rules = replace(rules, min_replies=0)  # the accountant counts every draw, even that of an empty cohort
        return RoundAttempt(attempt, TRAIN, roster, self._sizes, self.transport, rules, self._helper, recorded, groups)

    def _train_round(self) -> None:
        """Run the next round, in as many attempts as allowed."""
        t = self.round + 1
        recorded = self.replay.attempt(t) if self.replay is not None else None
        if recorded is not None and recorded.outcome == BURNT:
            self._burn(t)
            return
        first = recorded.attempt if recorded is not None else 1
        clients_lost: set[str] = set()
        number, failures = first, 0
        while failures < self.schedule.attempts:
            attempt, lacks_replies = Attempt(t, number), False
            self._settle(attempt)
            self.monitor.enter("training", doing=t, attempt=number)
            session = self._training(attempt, recorded, clients_lost)
            with self._costs(attempt):
                lacks_replies = self._try(attempt, session)
            self.journal.append(attempt)
            if attempt.outcome == SPENT:
                return
            self.monitor.attempted(attempt, counts=attempt.outcome == DONE)
            if attempt.outcome == DONE:
                self.round, self._burnt = t, 0
                if self._config.releases is not None:
                    self._config.releases.note(attempt)
                self._report_spent()
                if not self.roster.fixed:
                    self.transport.silence.take_part(attempt.answered)
                self.observer.round_done(attempt, self.schedule.rounds)
                return
            clients_lost.update(attempt.losses)
            number += 1
            waits = lacks_replies and self._waits_for_others(attempt)
            failures += not waits
            self.observer.attempt_failed(attempt, self.schedule.attempts)
            if session.has_revealed and not waits:
                self._burn(t)
                if self._burnt < self.schedule.attempts:
                    return
                break
            self._check_stop()
        raise QuorumError(
            f"{attempt.outcome} (round {t} failed {pluralize(number - first, 'time')})",
            hint=GO_ON,
        )

    def _burn(self, t: int) -> None:
        """Leave out a round whose members may have revealed a sum: they would answer it over the same set alone.

        In the next round they draw other batches, so that another cohort can answer.
        """
        self.round, self._burnt = t, self._burnt + 1
        self.journal.append(Attempt(t, 1, outcome=BURNT))
        self.monitor.burn(t)
        _log.warning("round %d is left out: members may have revealed a sum of it, and reveal no other one", t)

    def _waits_for_others(self, attempt: Attempt) -> bool:
        """Record the clients that refused an attempt in an open federation; return True if it does not count yet."""
        if self.roster.fixed:
            return False
        self.transport.silence.refuse(attempt.losses, attempt.answered)
        return self.roster.waits_for_others(attempt.round)

    def _try(self, attempt: Attempt, session: RoundAttempt) -> bool:
        """Train one round; if it fails, restore the server's state and record the reason in the attempt's outcome.

        Return True if too few clients answered.
        """
        state_before, beside = dict(self.server.state), self._federation_state()
        try:
            statistics = self.server.disclosed(self.server.train_round(session))
            if not attempt.answered:  # possible if clients are private; there is no mean loss
                statistics = {name: value for name, value in statistics.items() if not math.isnan(value)}
            self._check_finite(state_before, {"client_steps": statistics["client_steps"]} | statistics)
            attempt.statistics = statistics
            return False
        except (TooFewReplies, FloatingPointError) as error:
            attempt.outcome = str(error)
            self._restore(state_before, beside)
            return isinstance(error, TooFewReplies)
        except BudgetSpent as spent:
            attempt.outcome = SPENT
            self._restore(state_before, beside)
            self.ended_by = "budget"
            self.monitor.say(f"training has ended: {spent}")
            _log.warning("training ends after round %d: %s", self.round, spent)
            return False
        except Exception as error:
            self._restore(state_before, beside)
            attempt.outcome = self._failure(session, error)
            return False
        finally:
            session.close()

    def _federation_state(self) -> dict[str, Tensor]:
        """Return the tensors other than the method's that last between rounds."""
        return {} if self._private is None else self._private.state

    def _restore(self, state: dict[str, Tensor], beside: Mapping[str, Tensor]) -> None:
        """Return to the state before a failed attempt."""
        self.server.state = state
        if self._private is not None:
            self._private.load(beside)

    @contextmanager
    def _costs(self, attempt: Attempt) -> Iterator[None]:
        """Record the cost of the block in an attempt: seconds, bytes on the wire, refused parts."""
        started, traffic = time.perf_counter(), self.transport.traffic
        up, down = traffic.up, traffic.down
        refusals = dict(self.transport.refusals.counts)
        yield
        attempt.seconds = time.perf_counter() - started
        attempt.phases["server"] = max(0.0, attempt.seconds - sum(attempt.phases.values()))
        traffic = self.transport.traffic
        if up is not None and down is not None:
            attempt.wire_up, attempt.wire_down = (traffic.up or 0) - up, (traffic.down or 0) - down
        counts = dict(self.transport.refusals.counts).items()  # a copy: counts may change meanwhile
        attempt.refused = {reason: n - refusals.get(reason, 0) for reason, n in counts if n > refusals.get(reason, 0)}

    def _evaluation_due(self) -> bool:
        s = self.schedule
        if self.round == s.rounds:
            return s.measure_last
        return self.round % s.evaluate_every == 0

    def _evaluate_and_note(self) -> EvaluationResult:
        started = time.perf_counter()
        attempt = Attempt(self.round, 0, outcome=EVALUATED)
        self._settle(attempt)
        self.monitor.enter("evaluating")
        evaluation = self._evaluate(attempt)
        if not self.roster.fixed or attempt.paused or any(conversation.lost for conversation in attempt.conversations):
            attempt.phases.clear()
            self.journal.append(attempt)
        _log.info(
            "evaluated %d clients after round %d in %.2f s",
            evaluation.asked,
            self.round,
            time.perf_counter() - started,
        )
        line = metrics_line(
            evaluation,
            label_mask=self.schedule.label_mask,
            train_loss=self.journal.train_loss(),
            communication=self.communication(),
            client_steps=self.client_steps(),
            extra={**self.extra(evaluation), **self._report_spent(due=True)},
        )
        score = line_score(line)
        if score is not None and (self.best is None or score > self.best.score):
            self.best = Best(self.round, score)
        self.folder.append("metrics.jsonl", line)
        self._evaluated = self.round
        self.monitor.evaluated(line, None if self.best is None else self.best.round)
        self.observer.evaluated(line)
        return evaluation

    def _report_spent(self, *, due: bool = False) -> dict[str, dict[str, Any]]:
        """Report the privacy that training has spent to the monitor; return it as a line's sub-object, if any.

        Unless it is ``due``, it is skipped if it would take more than a fiftieth of the time.
        """
        releases = self._config.releases
        tally = None if releases is None else releases.training
        ended_at, took = self._accounted
        started = time.monotonic()
        if tally is None or (not due and started - ended_at < 50 * took):
            return {}
        epsilon = None if math.isinf(spent := tally.epsilon) else spent
        members = aggregator = epsilon
        if self._private is not None and tally.is_known:
            secure, settings = self._config.summation is not None, self._private.settings
            readings = readings_of(settings, tally.most(), tally.cohorts, secure=secure)
            members, aggregator = readings.members.epsilon, readings.aggregator.epsilon
        self._accounted = time.monotonic(), time.monotonic() - started
        now = PrivacySpent(tally.delta, tally.sums, epsilon, tally.limit, members, aggregator)
        self.monitor.spent(now)
        return {"privacy": asdict(now)}

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
                f"{error}: round {self.round} is not saved", hint=f"continue with {argument('resume')}"
            ) from error
        self.checkpoints.save(
            Checkpoint(
                self.algorithm.name,
                self.algorithm.version,
                self.round,
                self.best,
                self.server.state,
                federation=self._federation_state(),
            )
        )
        self._durable = (self.round, self.best)
        self._saved_at = time.monotonic()

    def _check_finite(self, state_before: Mapping[str, Tensor], statistics: Statistics) -> None:
        """Check the round's statistics, and the tensors of the server's state that differ from ``state_before``.

        Raise FloatingPointError if a value is not finite; the message names the keys to lower.
        """
        lower = to_lower(learning_rates(self.server.settings, also=("max_norm",)))
        for name, value in statistics.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"training diverged: {name} of this round's statistics is {value}{lower}")
        for name, tensor in self.server.state.items():
            if tensor is not state_before.get(name) and tensor.is_floating_point() and not is_finite(tensor):
                raise FloatingPointError(
                    f"training diverged: {name} of the server's state is not finite after this round{lower}"
                )

    def communication(self) -> Communication:
        """Return the bytes of all training rounds so far."""
        costs, traffic = self.journal.costs, self.transport.traffic
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
    """Return all messages that a conversation of this algorithm can contain, by name, except those of secure sums."""
    return {message.__name__: message for message in (*algorithm.messages, Metrics, SummedMetrics)}
