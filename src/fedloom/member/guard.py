"""Checks of a member's policy: when a worker joins, at each question, and before an answer leaves."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path

import torch

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.sums import STATISTICS
from fedloom.core.words import first_of, rounded_up
from fedloom.engine.assemble import run_digest
from fedloom.engine.sums import sums_part
from fedloom.engine.training_privacy import noisy_steps_of
from fedloom.errors import DataError, ExperimentError, FedloomError, RefusedError
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.experiment import Experiment, OwnData
from fedloom.experiment.loading import named_code
from fedloom.federation.measuring import MEASURE, MeasureInputs
from fedloom.federation.transport import ConversationKey, Declined
from fedloom.member.approvals import Approvals, experiment_digest
from fedloom.member.policy import MEASURES, MOMENTS, PolicyFile, TrafficLimits, code_digest, permitted_fields
from fedloom.member.usage import Usage
from fedloom.messages import Message, Metrics, SummedMetrics
from fedloom.models.factories import is_permitted_to_send, permit_sent_factory
from fedloom.privacy.accounting import Release, epsilon_bound, epsilon_of
from fedloom.privacy.settings import SMALLEST_SUM, TrainingPrivacy, least_survivors
from fedloom.privacy.spent import Spent, TrainingCost
from fedloom.privacy.tally import fits

log = logging.getLogger("fedloom.member")

RETRY_S = 60.0
"""Seconds after which a worker asks an open federation again whose experiment its policy refuses."""

RESERVE = 4096
"""Bytes of a day that are left for the reason why the worker disconnects."""

Now = Callable[[], datetime]


def refusals(file: PolicyFile, experiment: Experiment) -> Iterator[str]:
    """Yield what a policy refuses in an experiment, each with the line of the policy."""
    yield from _method_refusals(file, experiment)
    yield from _sum_refusals(file, experiment)
    yield from _privacy_refusals(file, experiment)
    policy, data = file.policy, experiment.data
    measures = isinstance(data, OwnData) and data.own.normalization == "measured" and data.own.spec.numbers > 0
    if measures and policy.metrics is not None and MOMENTS not in policy.metrics:
        yield f"{file.place('metrics')}: sums of the inputs may not leave, and data.own.normalization is measured"
    if not policy.personalization and experiment.evaluation.own_steps:
        yield f"{file.place('personalization')}: is false, and evaluation.own_steps is set"
    digest = experiment_digest(experiment.shared_json())
    if policy.approve == "listed" and digest not in policy.experiments:
        yield f"{file.place('experiments')}: does not list this experiment, {digest}"


def code_refusals(file: PolicyFile, names: Sequence[str]) -> Iterator[str]:
    """Yield the factories and metrics, by name, that a policy and FEDLOOM_FACTORIES do not let an aggregator name."""
    if (allowed := file.policy.factories) is None:
        return
    for name in names:
        if name not in allowed and not is_permitted_to_send(name):
            yield f"{file.place('factories')}: does not list {name}"


def _method_refusals(file: PolicyFile, experiment: Experiment) -> Iterator[str]:
    methods, name = file.policy.methods, experiment.algorithm.name
    if methods is None:
        return
    digest = code_digest(type(find_algorithm(name)))
    if name not in methods:
        listed = first_of(list(methods)) or "none"
        code = "" if digest is None else f", whose code is {digest}"
        yield f"{file.place('methods')}: lists {listed}, and the experiment has {name}{code}"
    elif (stated := methods[name] if isinstance(methods, dict) else None) != digest:
        yield f"{file.place('methods', name)}: states code {stated or 'of FedLoom'}, and it is {digest or 'of FedLoom'}"


def _sum_refusals(file: PolicyFile, experiment: Experiment) -> Iterator[str]:
    policy, federation = file.policy, experiment.federation
    secure, size = federation.secure_aggregation, federation.clients_per_round
    if not policy.only_sums:
        return
    place = file.place("only_sums")
    if secure is None or secure.signatures not in ("keys", "certificates"):
        yield f"{place}: the experiment has no secure aggregation with signed keys"
    elif (weaker := sums_part().weaker_graph(secure, size)) is not None:
        yield f"{place}: {weaker}"
    if policy.smallest_cohort is not None and size < policy.smallest_cohort:
        yield (
            f"{file.place('smallest_cohort')}: is {policy.smallest_cohort}, and federation.clients_per_round is {size}"
        )


def _privacy_refusals(file: PolicyFile, experiment: Experiment) -> Iterator[str]:
    wanted, found = file.policy.privacy, experiment.federation.privacy
    if wanted is None:
        return
    place = file.place("privacy")
    if found is None:
        yield f"{place}: the experiment has no federation.privacy"
        return
    if wanted.unit == "clients" and found.of != "clients":
        yield f"{file.place('privacy', 'unit')}: is clients, and federation.privacy.of is {found.of}"
    if found.of == "clients" and found.noise == "central":
        yield f"{place}: federation.privacy.noise is central, which no member can verify; it must be distributed"
    z, least = found.noise_multiplier, wanted.noise_multiplier
    if z is None:
        yield f"{place}: the experiment has no federation.privacy.noise_multiplier"
    elif least is not None and z < least:
        where = file.place("privacy", "noise_multiplier")
        yield f"{where}: is at least {least:g}, and federation.privacy.noise_multiplier is {z:g}"


def model_refusals(file: PolicyFile, experiment: Experiment, size: int) -> Iterator[str]:
    """Yield why a policy refuses a model of so many bytes, and limits that the first round would exceed."""
    policy, trains = file.policy, find_algorithm(experiment.algorithm.name).trains
    if policy.largest_model is not None and size > policy.largest_model:
        yield f"{file.place('largest_model')}: is {policy.largest_model} bytes, and the model has {size}"
    for key in ("per_round", "per_day"):
        limit = getattr(policy.traffic, key)
        if limit is not None and trains and limit < 2 * size:
            yield (
                f"{file.place('traffic', key)}: is {limit} bytes, and the first round needs at least {2 * size}: the "
                "model down, and an update up"
            )


def check_options(file: PolicyFile, states: str | None, *, sends_class_counts: bool) -> None:
    """Raise ExperimentError if a policy contradicts the worker's options, or lacks a folder."""
    if sends_class_counts and file.policy.class_counts is False:
        raise ExperimentError(
            f"{file.place('class_counts')} is false, and the worker is set to send class counts.",
            key="class_counts",
            found=False,
            hint="remove class_counts=true from the worker's settings",
        )
    file.folder(states)


@dataclass(frozen=True)
class _Refused:
    """Refusal of the aggregator's experiment; until a monotonic time, or without end."""

    reason: str
    until: float | None
    digest: str


class PolicyEnforcer:
    """A member's policy at work: gate of the connection (:class:`~fedloom.federation.transport.Gate`), and guard of the
    clients (:class:`~fedloom.federation.transport.Guard`).

    Parameters
    ----------
    file
        The policy.
    states
        The worker's folder of states, if it is on this machine.
    sends_class_counts
        True if the worker announces class counts.
    aggregator
        Address, for approvals.
    now
        Local time.

    Raises
    ------
    ExperimentError
        If the policy needs a folder and has none, or contradicts the worker's options.
    DataError
        If its record is damaged, or another worker uses the folder.
    """

    def __init__(
        self,
        file: PolicyFile,
        *,
        states: str | None = None,
        sends_class_counts: bool = False,
        aggregator: str = "",
        now: Now = datetime.now,
    ) -> None:
        policy = self.policy = file.policy
        self.file = file
        check_options(file, states, sends_class_counts=sends_class_counts)
        folder = file.folder(states)
        self._now, self._aggregator = now, aggregator
        self._approvals = Approvals(folder) if folder is not None and policy.approve == "ask" else None
        counted = file.needs_folder not in (None, "approve") or policy.traffic != TrafficLimits()
        self._usage = Usage(folder if counted else None, policy.traffic.per_day, now)
        self._refused: _Refused | None = None
        self._ended: FedloomError | None = None
        self._full: date | None = None  # day of which no bytes are left
        self.withheld = ""
        self._digest = ""  # of the admitted experiment
        self._run = ""
        self._experiment: Experiment | None = None
        self._steps: Callable[[int, str], Mapping[Release, int]] | None = None
        self._sizes: Mapping[str, int] = {}
        self._fields: frozenset[str] = frozenset(MEASURES)
        for name in policy.factories or ():
            permit_sent_factory(name)

    def close(self) -> None:
        """Let another worker use the folder."""
        self._usage.close()

    # --- gate of the connection

    @property
    def ended(self) -> FedloomError | None:
        """Error that ends the worker; None while it goes on."""
        return self._ended

    def closed(self) -> str | None:
        """Return why the worker must not be connected now; None if it may be. Callable from any thread."""
        if (hours := self.file.hours) is not None and not hours.contains(self._now().time()):
            return f"{self.file.place('hours')}: it is outside {self.policy.hours}; waits until {hours.start:%H:%M}"
        limit = self.policy.traffic.per_day
        if limit is not None and (self._usage.today >= limit - RESERVE or self._full == self._now().date()):
            return f"{self.file.place('traffic', 'per_day')}: the {limit} bytes of this day are used up"
        if (refused := self._refused) is not None:
            if refused.until is None:  # it waits for approval
                over = self._state(refused.digest) in ("approved", None)
            else:
                over = time.monotonic() >= refused.until
            if not over:
                return refused.reason
            self._refused = None
        if self._digest and self._state(self._digest) == "refused":
            return self._unapproved("refused", self._digest)
        return None

    def count(self, size: int, *, sending: bool) -> bool:
        """Count a frame on the wire; return False, without counting, if it must not be sent."""
        if (limit := self.policy.traffic.per_day) is None:
            return True
        most = limit if size <= RESERVE else limit - RESERVE
        if sending and self._usage.today + size > most:
            self._full = self._now().date()
            return False
        self._usage.count(size)
        return True

    def charge(self, key: ConversationKey, size: int) -> str | None:
        """Count a message of a conversation that is about to be sent or received; return why it must not be.

        A message that is refused is not counted.
        """
        traffic = self.policy.traffic
        if traffic.per_day is not None and (today := self._usage.today + size + RESERVE) > traffic.per_day:
            return f"{self.file.place('traffic', 'per_day')}: this day would need {today} bytes"
        if (limit := traffic.per_round) is not None:
            used = self._usage.count_round(f"{self._run} {key.round}", size, limit)
            if used > limit:
                return f"{self.file.place('traffic', 'per_round')}: round {key.round} would need {used} bytes"
        return None

    # --- joining

    def check_code(self, text: str) -> None:
        """Raise Declined if an aggregator's experiment, as JSON, names code that the policy does not allow."""
        try:
            value = json.loads(text)
        except ValueError:
            return  # reported where it is parsed
        if isinstance(value, dict) and (found := list(code_refusals(self.file, [n for _, n in named_code(value)]))):
            data = value.get("data")
            self._decline(found, is_open=isinstance(data, dict) and "own" in data, digest="")

    def admit(self, experiment: Experiment, sizes: Mapping[str, int]) -> None:
        """Begin to serve an experiment; raise Declined if the policy refuses it, or it waits for approval.

        ``sizes`` are the clients' numbers of training examples.
        """
        self._experiment, self._digest = None, ""
        shared = experiment.shared_json()
        digest, is_open = experiment_digest(shared), isinstance(experiment.data, OwnData)
        if found := list(refusals(self.file, experiment)):
            self._decline(found, is_open=is_open, digest=digest)
        if self._approvals is not None:
            state = self._approvals.ask(digest, shared, self._aggregator)
            if state == "waiting":
                self._wait(self._unapproved(state, digest), digest)
            if state == "refused":
                self._decline([self._unapproved(state, digest)], is_open=is_open, digest=digest)
        self._experiment, self._digest, self._run = experiment, digest, run_digest(experiment)
        self._sizes, self._steps = sizes, noisy_steps_of(experiment)

    def check_size(self, size: int) -> None:
        """Raise Declined if the policy refuses a model of so many bytes, or its limits do not suffice for a round."""
        assert self._experiment is not None
        if found := list(model_refusals(self.file, self._experiment, size)):
            self._decline(found, is_open=isinstance(self._experiment.data, OwnData), digest=self._digest)

    def begin(self, plan: EvaluationPlan) -> None:
        """Decide which of these measurements may leave; log, and tell the aggregator, those that stay."""
        names = {**MEASURES, "sums": tuple(metric.name for part in plan.sums for metric in part.metrics)}
        self._fields = frozenset(permitted_fields(self.policy, names))
        allowed = self.policy.metrics
        kept = {*MEASURES} - self._fields - {"models"}
        kept |= {name for name in names["sums"] if allowed is not None and name not in allowed}
        key = "metrics" if allowed is not None else "class_counts"
        self.withheld = f"{self.file.place(key)}: withholds {', '.join(sorted(kept))}" if kept else ""
        if kept:
            log.info("%s", self.withheld)

    def _state(self, digest: str) -> str | None:
        return None if self._approvals is None else self._approvals.state(digest)

    def _unapproved(self, state: str, digest: str) -> str:
        place = self.file.place("approve")
        if state == "refused":
            return f"{place}: the member has refused experiment {digest}"
        return f"{place}: experiment {digest} waits for the member's approval"

    def _wait(self, reason: str, digest: str) -> None:
        log.warning("%s; see `fedloom member show`, then `fedloom member approve %s`", reason, digest)
        self._refused = _Refused(reason, None, digest)
        raise Declined(reason)

    def _decline(self, found: Sequence[str], *, is_open: bool, digest: str) -> None:
        reason = "; ".join(found)
        log.error("refused the aggregator's experiment: %s", reason)
        self._refused = _Refused(reason, time.monotonic() + RETRY_S, digest)
        if not (is_open and self.file.is_file):  # an open federation may change its experiment
            self._ended = RefusedError(f"the policy refuses the aggregator's experiment: {reason}")
        raise Declined(reason)

    # --- questions and answers

    def question(self, key: ConversationKey, message: Message, *, trains: bool) -> None:
        """Raise DataError if the policy forbids to answer a message; count the privacy that an opening costs."""
        if (reason := self.closed()) is not None:
            raise DataError(reason)
        self._check_size(message)
        metrics = self.policy.metrics
        if isinstance(message, MeasureInputs) and metrics is not None and MOMENTS not in metrics:
            raise DataError(f"{self.file.place('metrics')}: sums of the inputs may not leave")
        if not trains and "/" in key.purpose and not self.policy.personalization:
            raise DataError(f"{self.file.place('personalization')}: is false, and the question is {key.purpose[:40]!r}")

    def opens(self, key: ConversationKey, client: str) -> None:
        """Count the noisy steps of a conversation that opens; raise DataError if a client would spend too much."""
        if self._steps is not None and self.policy.privacy is not None:
            self._spend(client, Counter(self._steps(self._sizes.get(client, 0), key.purpose)))

    def answer(self, key: ConversationKey, client: str, message: Message, *, trains: bool, summed: bool) -> None:
        """Raise DataError if the policy forbids an answer to leave; count the noisy sum that it is part of."""
        policy = self.policy
        measured = isinstance(message, Metrics | SummedMetrics)
        told = trains and all(each.quantity in STATISTICS for each in message.fields())
        if policy.only_sums and not summed and not told:
            raise DataError(f"{self.file.place('only_sums')}: {type(message).__name__} is no part of a sum")
        if not trains and not measured and not policy.personalization and key.purpose != MEASURE:
            place = self.file.place("personalization")
            raise DataError(f"{place}: is false, and {type(message).__name__} is no plain measurement")
        privacy = self._privacy
        if trains and summed and policy.privacy is not None and privacy is not None and privacy.of == "clients":
            self._spend(client, Counter({self._sum_release(privacy): 1}))

    def cohort(self, members: int, weaker: str | None) -> None:
        """Raise RefusedError if a secure sum over so many members is refused; ``weaker`` says why its graph is."""
        if self.policy.only_sums and weaker is not None:
            raise RefusedError(f"{self.file.place('only_sums')}: {weaker}")
        least = self.policy.smallest_cohort
        if least is not None and members < least:
            raise RefusedError(f"{self.file.place('smallest_cohort')}: is {least}, and the sum is over {members}")

    def withhold(self, measured: Metrics, plan: EvaluationPlan) -> Metrics:
        """Return measurements with zeros in place of those that may not leave."""
        tensors = {name: t if name in self._fields else torch.zeros_like(t) for name, t in measured.tensors().items()}
        if (allowed := self.policy.metrics) is not None and "sums" in self._fields:
            kept = [(part.size, all(metric.name in allowed for metric in part.metrics)) for part in plan.sums]
            mask = torch.tensor([keep for size, keep in kept for _ in range(size)], dtype=torch.float64)
            tensors["sums"] = tensors["sums"] * mask
        return replace(measured, **tensors)

    def _check_size(self, message: Message) -> None:
        limit = self.policy.largest_model
        if limit is None:
            return
        for each in message.fields():
            tensor = message.tensors()[each.name]
            size = tensor.nbytes // (max(1, tensor.shape[0]) if each.per_client else 1)
            if size > limit:
                what = f"{type(message).__name__}.{each.name}"
                raise DataError(f"{self.file.place('largest_model')}: is {limit} bytes, and {what} has {size}")

    # --- privacy

    @property
    def _privacy(self) -> TrainingPrivacy | None:
        return None if self._experiment is None else self._experiment.federation.privacy

    def _sum_release(self, privacy: TrainingPrivacy) -> Release:
        """Return the release of a sum with shares of noise, toward a member that knows the cohort and its own share."""
        assert privacy.noise_multiplier is not None
        shares = least_survivors(self.policy.smallest_cohort or SMALLEST_SUM)
        return Release(1.0, privacy.noise_multiplier * (1 - 1 / shares) ** 0.5, None, None, "all")

    def _spend(self, client: str, more: Counter[Release]) -> None:
        """Record releases about a client before they are made; raise DataError if its ε would be too large."""
        wanted, privacy = self.policy.privacy, self._privacy
        assert wanted is not None
        assert privacy is not None
        counts = self._usage.spent(self._run, client) + more
        if wanted.epsilon is not None and not fits(counts, wanted.delta, wanted.epsilon):
            found = rounded_up(epsilon_of(counts, wanted.delta))
            place = self.file.place("privacy", "epsilon")
            raise DataError(f"{place}: is {wanted.epsilon:g}, and with this answer ε would be {found}")
        if (most := wanted.epsilon_total) is not None:
            costs = {**self._usage.costs(client), self._run: TrainingCost.planned(privacy, counts)}
            before = self._ledger()
            spent = Spent(before.descriptors, (*before.trainings, *costs.values()))
            if (total := spent.total(wanted.delta).epsilon) > most:
                place = self.file.place("privacy", "epsilon_total")
                raise DataError(f"{place}: is {most:g}, and with this answer ε would be {rounded_up(total)} in all")
        self._usage.spend(self._run, client, privacy, counts)

    def spent(self) -> tuple[float, float] | None:
        """Return a bound on the largest ε that a client has spent in the run, and its δ.

        Return None if the policy counts none, or the package that accounts for samples is not installed.
        """
        if (wanted := self.policy.privacy) is None or self._privacy is None or not self._sizes:
            return None
        counts = {frozenset(self._usage.spent(self._run, client).items()) for client in self._sizes}
        try:
            return max(epsilon_bound(Counter(dict(each)), wanted.delta) for each in counts), wanted.delta
        except ExperimentError:
            return None

    def _ledger(self) -> Spent:
        wanted = self.policy.privacy
        assert wanted is not None
        if wanted.ledger is None:
            return Spent()
        from fedloom.ledger.ledger import PrivacyAccountant

        path: Path = self.file.relative(wanted.ledger)
        return PrivacyAccountant(path).content().spent
