"""Record of differentially private answers and sums, written before clients are asked and never undone.

The journal lists the rounds that count, and loses those that run again after a resume. Released answers stay released,
so ``releases.jsonl`` has a line for each exchange that asks for a private answer, and is not cut on resume: it counts
failed attempts, evaluations, repeated rounds, and clients asked again after a worker restart.

With ``federation.privacy`` it also has a line for each noisy sum over a cohort, and for each exchange whose answers
come from noisy steps on examples. These lines have the key ``about``, and are written before the cohort is asked, so
that :class:`BudgetSpent` can end training before a sum that would exceed the budget.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fedloom.core.digests import RESTORE
from fedloom.errors import DataError
from fedloom.federation.transport import ConversationKey
from fedloom.privacy.accounting import EVERYONE, Release, gaussian_release
from fedloom.privacy.examples import Privacy
from fedloom.privacy.tally import Cohorts, Counts, Tally, Unit
from fedloom.runs.files import JOURNAL, RELEASES
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import DONE, Attempt

BEGIN = "begin"
"""Purpose in the first line: everything after it is counted."""
BEFORE = "before"
"""Purpose that marks earlier rounds whose answers were not private, or were not counted."""

TRAINING = "training"
"""Value of ``about`` in lines about noisy sums and steps of training; lines about clients' answers have none."""

Keep = Callable[[Mapping[str, Any]], None]
"""Function that stores a line where other aggregators can read it."""


class BudgetSpent(Exception):
    """A sum of training would exceed ``federation.privacy.budget``; nothing was asked for."""


class Releases:
    """Writer of ``releases.jsonl`` for the lifetime of one aggregator.

    ``promised`` are the private answers and their noise; None if no answers are private. For a published run, ``keep``
    is called with each line before it takes effect. ``training`` counts noisy sums and steps of training, including
    those of earlier aggregators, and has the budget; None if training is not private. If it is about examples, the
    private answers of clients count, too. For ``repeatable`` see :func:`count_releases`.
    """

    def __init__(
        self,
        folder: RunFolder,
        promised: Privacy | None,
        keep: Keep | None = None,
        training: Tally | None = None,
        *,
        repeatable: bool = False,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._lock = threading.Lock()
        self._life = uuid.uuid4().hex
        self._written = 0
        self.noise_multiplier = 0.0 if promised is None else promised.noise_multiplier
        self.covers: Collection[str] = () if promised is None else promised.covers
        self.training = training
        file = folder.line_file(RELEASES)
        whole = [line.end for line in file.forwards() if line.whole]
        file.cut(whole[-1] if whole else 0)  # a line that was cut short belongs to a request that was never sent
        self._is_new = not folder.has("journal.jsonl")
        self._begin({}, promised is not None)
        self._begin({"about": TRAINING}, training is not None)
        if training is not None:
            releases = count_releases_about(folder, training.unit, repeatable=repeatable)
            training.restore(releases.counts, releases.cohorts, is_known=releases.is_known)

    def _begin(self, header: Mapping[str, str], is_private: bool) -> None:
        """Mark where counting begins, or that it was interrupted.

        The run may have begun without private answers or sums, or continue without them.
        """
        is_recorded = any(line.get("about") == header.get("about") for line in self._folder.objects(RELEASES))
        if is_private != is_recorded:
            purpose = BEGIN if is_private and self._is_new else BEFORE
            self._write({"purpose": purpose, "noise_multiplier": 0.0, "clients": [], **header})

    def tell(self, key: ConversationKey, exchange: int, clients: Sequence[str]) -> None:
        """Record that these clients are about to answer; the line is durable when this returns.

        Raise StorageError if it cannot be written; the clients must then not be asked.
        """
        header = {"purpose": key.purpose, "noise_multiplier": self.noise_multiplier}
        self._write({**_at(key), "exchange": exchange, **header, "clients": list(clients)})
        if self.training is not None and self.training.unit == "examples":
            with self._lock:
                self.training.add(
                    {client: {gaussian_release(self.noise_multiplier): n} for client, n in Counter(clients).items()}
                )

    def tell_sum(self, key: ConversationKey, release: Release, cohort: Sequence[str]) -> None:
        """Record that a cohort is about to be asked for a noisy sum over it; the line is durable when this returns.

        Raise BudgetSpent if the sum would exceed the budget, and StorageError if the line cannot be written; the cohort
        must then not be asked.
        """
        self._record_training(key, {EVERYONE: Counter({release: 1})}, cohort)

    def note(self, attempt: Attempt) -> None:
        """Record that an attempt has become a round: its sums had the clients that were not lost."""
        if self.training is not None:
            with self._lock:
                _note_cohorts(self.training.cohorts, ((one.clients, one.lost) for one in attempt.conversations))

    def tell_steps(self, key: ConversationKey, exchange: int, steps: Counts, *, again: bool = False) -> None:
        """Record that clients are about to take noisy steps on their examples: the releases of each client.

        Clients that are asked ``again`` after their worker restarted count again, whatever the budget. Raise as
        :meth:`tell_sum`.
        """
        self._record_training(key, steps, exchange=exchange, within_budget=not again)

    def _record_training(
        self,
        key: ConversationKey,
        counts: Counts,
        cohort: Sequence[str] | None = None,
        *,
        within_budget: bool = True,
        **place: int,
    ) -> None:
        if self.training is None:
            raise RuntimeError("noisy sums are counted only in a run with federation.privacy")
        if within_budget and not self.training.may_release(counts):
            raise BudgetSpent(
                f"another round would exceed federation.privacy.budget, ε = {self.training.limit:g} at δ = "
                f"{self.training.delta:g}"
            )
        alike: defaultdict[tuple[Release, int], list[str]] = defaultdict(list)
        for client, releases in counts.items():
            for release, times in releases.items():
                alike[release, times].append(client)
        lines = [{**asdict(release), "times": n, "units": units} for (release, n), units in alike.items()]
        header: dict[str, Any] = {"about": TRAINING, "purpose": key.purpose, "releases": lines}
        header |= {} if cohort is None else {"cohort": list(cohort)}
        self._write({**_at(key), **place, **header})
        with self._lock:
            self.training.add(counts, cohort)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            self._written += 1
            line = {**line, "life": self._life, "number": self._written}
            self._folder.append(RELEASES, line)
            self._folder.sync(RELEASES)
            if self._keep is not None:
                self._keep(line)


def _at(key: ConversationKey) -> dict[str, Any]:
    return {"round": key.round, "attempt": key.attempt, "conversation": key.conversation}


@dataclass(frozen=True)
class ReleaseCounts:
    """Number of private answers of each client that was ever in the run, by noise multiplier.

    ``is_known`` is False if some answers had no noise, or were not counted.
    """

    times: Mapping[str, Mapping[float, int]]
    is_known: bool


@dataclass(frozen=True)
class TrainingReleases:
    """Noisy sums and steps of training, by the client that they are about; ``EVERYONE`` for sums over cohorts.

    ``is_known`` is False if some rounds had no noise, or were not counted. ``cohorts`` are those of sums over clients.
    """

    counts: Mapping[str, Counter[Release]] = field(default_factory=dict)
    is_known: bool = True
    cohorts: Cohorts = field(default_factory=Cohorts)


def count_releases(folder: RunFolder, *, repeatable: bool) -> ReleaseCounts:
    """Return the private answers of each client.

    Answers are ``repeatable`` if the noise is derived from the seed: a repeated request gets the same answer, which
    reveals nothing more.

    Raise DataError if ``releases.jsonl`` is damaged.
    """
    times: defaultdict[str, Counter[float]] = defaultdict(Counter)
    lines, is_known = _lines(folder, None, repeatable=repeatable)
    for line in lines:
        match line:
            case {"noise_multiplier": int() | float() as z, "clients": list() as clients} if z >= 0:
                for client in clients:
                    times[client][z] += 1
            case _:
                raise _damaged(folder)
    return ReleaseCounts(times, is_known)


def count_training_releases(folder: RunFolder, *, repeatable: bool = False) -> TrainingReleases:
    """Return the noisy sums and steps of training, ``repeatable`` as in :func:`count_releases`.

    Raise DataError if ``releases.jsonl`` is damaged.
    """
    counts: defaultdict[str, Counter[Release]] = defaultdict(Counter)
    cohorts = Cohorts()
    lines, is_known = _lines(folder, TRAINING, repeatable=repeatable)
    for line in lines:
        try:
            for entry in line.get("releases", []):
                release = Release(**{name: entry[name] for name in _FIELDS})
                for unit in entry["units"]:
                    counts[unit][release] += entry["times"]
                    if unit == EVERYONE:
                        cohorts.add(release, line.get("cohort"), entry["times"])
        except (KeyError, TypeError, ValueError):
            raise _damaged(folder) from None
    for line in folder.objects(JOURNAL) if cohorts.of else ():
        if line.get("outcome") == DONE:
            _note_cohorts(cohorts, ((one["clients"], one["lost"]) for one in line["conversations"]))
    return TrainingReleases(counts, is_known, cohorts)


def _note_cohorts(cohorts: Cohorts, conversations: Iterable[tuple[Sequence[str], Sequence[Any]]]) -> None:
    """Record how many clients stayed in the cohorts of a round."""
    for clients, lost_rows in conversations:
        cohorts.note(len(clients) - len(lost_rows))


def count_releases_about(folder: RunFolder, unit: Unit, *, repeatable: bool = False) -> TrainingReleases:
    """Return all that training has released about clients, or about examples: for these, private answers included.

    Raise DataError if ``releases.jsonl`` is damaged.
    """
    training = count_training_releases(folder, repeatable=repeatable)
    if unit == "clients":
        return training
    answers = count_releases(folder, repeatable=repeatable)
    counts = {client: Counter(releases) for client, releases in training.counts.items()}
    for client, times in answers.times.items():
        for noise_multiplier, count in times.items():
            counts.setdefault(client, Counter())[gaussian_release(noise_multiplier)] += count
    return TrainingReleases(counts, training.is_known and answers.is_known)


_FIELDS = [each.name for each in fields(Release)]
_KEY = ("purpose", "round", "attempt", "conversation", "exchange")


def _lines(folder: RunFolder, subject: str | None, *, repeatable: bool) -> tuple[list[dict[str, Any]], bool]:
    """Return the lines about answers (None) or training, and whether they are all that there was."""
    seen: set[tuple[Any, ...]] = set()
    lines, is_known = [], True
    for line in folder.objects(RELEASES):
        if not isinstance(line.get("purpose"), str):
            raise _damaged(folder)
        if line.get("about") != subject:
            continue
        is_known = is_known and line["purpose"] != BEFORE
        identity = tuple(line.get(name) for name in _KEY)
        if not (repeatable and identity in seen):
            seen.add(identity)
            lines.append(line)
    return lines, is_known


def _damaged(folder: RunFolder) -> DataError:
    return DataError(f"{folder.path / RELEASES} has a line not written by FedLoom.", hint=RESTORE)
