"""Ledger of a client's privacy budget: the trainings that it took part in, its requests, and their total (ε, δ)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fedloom.core import digests
from fedloom.core.files import PRIVATE_FILE
from fedloom.core.words import parsed_json, pluralize, rounded_up
from fedloom.errors import DataError, ExperimentError, StorageError, argument
from fedloom.ledger.training_cost import ClaimedTraining
from fedloom.privacy.spent import PrivacyGuarantee, Spent, Total, TrainingCost

VERSION = 2
TRAINING_VERSION = 3
"""Version of lines about trainings: an earlier FedLoom refuses them, instead of counting without them."""
KIND = "ledger"
"""Kind of the file in :mod:`fedloom.core.digests`."""


@dataclass(frozen=True)
class LedgerContent:
    """Content of a ledger.

    Attributes
    ----------
    delta
        The ledger's δ; None if it is empty.
    spent
        Releases of its lines.
    lines
        Its lines about trainings and requests, in order.
    last
        Digest of the last line.
    """

    delta: float | None
    spent: Spent
    lines: tuple[Mapping[str, Any], ...]
    last: str

    @property
    def total(self) -> Total:
        """Total (ε, δ) of all lines."""
        return self.spent.total(0.0 if self.delta is None else self.delta)

    @property
    def trainings(self) -> tuple[Mapping[str, Any], ...]:
        """Lines about trainings."""
        return tuple(line for line in self.lines if line["version"] == TRAINING_VERSION)

    @property
    def requests(self) -> tuple[Mapping[str, Any], ...]:
        """Lines about requests."""
        return tuple(line for line in self.lines if line["version"] == VERSION)

    def __str__(self) -> str:
        """Return the numbers of trainings and requests as part of a sentence."""
        return f"{pluralize(len(self.trainings), 'training')} and {pluralize(len(self.requests), 'request')}"


class PrivacyAccountant:
    """Ledger with one JSON object per training or request that has released something about the client's data.

    The first line states the δ at which the total ε is computed: that of the first training or request. A later request
    with a larger δ, and less noise, therefore counts for more. The ledger counts every request that names it, whatever
    the data, server and round, since two data sets may share examples. Any number of processes may use it concurrently.

    The file is created with mode 0600; its folder must exist. The ``budget`` is the maximum total ε of requests at the
    ledger's δ, trainings included; None: no limit.
    """

    def __init__(self, path: Path, budget: float | None = None) -> None:
        self._path = path
        self._budget = budget

    def content(self) -> LedgerContent:
        """Return the content of the file; raise DataError if there is none, or as :meth:`charge`."""
        try:
            with self._path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                return self._read(file)
        except OSError as error:
            raise DataError(
                f"{argument('ledger')}: {self._path} cannot be read: {(error.strerror or str(error)).lower()}",
                hint="a first training or request creates it",
            ) from error

    def charge(self, guarantee: PrivacyGuarantee, **run: str) -> PrivacyGuarantee:
        """Record a request before it releases anything; return its guarantee with the new total.

        The record is on disk when the call returns, so a request that fails later has been counted.

        Raise ExperimentError if the total would exceed the budget (the file is then unchanged), or sampled sums of
        training must be accounted for and ``dp-accounting`` is not installed; DataError if the file is not a ledger of
        this version, or is damaged; StorageError if it cannot be written.
        """
        with self._opened() as file:
            content = self._read(file)
            delta = guarantee.delta if content.delta is None else content.delta
            multipliers = (*content.spent.descriptors, guarantee.noise_multiplier)
            total = replace(content.spent, descriptors=multipliers).total(delta)
            if self._budget is not None and total.epsilon > self._budget:
                spent, after_it = (rounded_up(e, 4) for e in (content.spent.total(delta).epsilon, total.epsilon))
                spent_text = str(content) if content.trainings else pluralize(len(content.requests), "request")
                raise ExperimentError(
                    f"{argument('budget')} is {self._budget:g}, and with this request ε would be {after_it} at the "
                    f"ledger's δ = {rounded_up(total.delta)} ({spent} after {spent_text} in {self._path}).",
                    key="budget",
                    found=total.epsilon,
                    hint=f"use a smaller {argument('epsilon')}, or a larger {argument('budget')}",
                )
            line = {
                "version": VERSION,
                "time": _now(),
                **run,
                "epsilon": guarantee.epsilon,
                "delta": guarantee.delta,
                "noise_multiplier": guarantee.noise_multiplier,
                "examples": guarantee.examples,
            }
            _append(file, content, delta, line)
        return replace(
            guarantee,
            requests=len(content.requests) + 1,
            trainings=len(content.trainings),
            total_epsilon=total.epsilon,
            total_delta=total.delta,
        )

    def add_training(self, claim: ClaimedTraining) -> bool:
        """Record a training that the client took part in; return False if the ledger has it already.

        It is recorded whatever the budget, because it has happened. Raise as :meth:`charge`.
        """
        with self._opened() as file:
            content = self._read(file)
            if any(line["claim"] == claim.digest for line in content.trainings):
                return False
            cost = claim.cost.model_dump()
            line = {"version": TRAINING_VERSION, "time": _now(), "run": claim.run, "claim": claim.digest, **cost}
            _append(file, content, claim.cost.delta if content.delta is None else content.delta, line)
        return True

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """Open the file, locked; raise StorageError if it cannot be written."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
            with os.fdopen(descriptor, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(
                f"{argument('ledger')}: {self._path} cannot be written: {(error.strerror or str(error)).lower()}; "
                "nothing was released",
                hint="choose a file in an existing folder, on a disk with free space",
            ) from error

    def _read(self, file: BinaryIO) -> LedgerContent:
        """Return the content of the file; raise DataError if it is not a ledger, or is damaged."""
        delta: float | None = None
        lines: list[Mapping[str, Any]] = []
        multipliers: list[float] = []
        trainings: list[TrainingCost] = []
        last = digests.beginning(KIND)
        for number, line in enumerate(file, 1):
            try:
                entry = parsed_json(line)
                version = entry["version"]
                if version not in (VERSION, TRAINING_VERSION):
                    versions = f"{VERSION} and {TRAINING_VERSION}"
                    raise self._refused(number, f"its format is version {version}, and this FedLoom reads {versions}")
                last = digests.check_line(line, last)
                if delta is None:
                    delta = float(entry["delta"])
                    continue
                if version == TRAINING_VERSION:
                    trainings.append(_training(entry))
                else:
                    multipliers.append(float(entry["noise_multiplier"]))
                lines.append(entry)
            except digests.Damaged as error:
                raise self._refused(number, str(error)) from None
            except (ValueError, TypeError, KeyError):
                excerpt = line[:80].decode(errors="replace").strip()
                raise self._refused(number, f"{excerpt!r} is not a ledger line") from None
        return LedgerContent(delta, Spent(tuple(multipliers), tuple(trainings)), tuple(lines), last)

    def _refused(self, number: int, reason: str) -> DataError:
        return DataError(
            f"{self._path}, line {number}: {reason}",
            hint="if the last line is incomplete, delete it (nothing was released); otherwise restore the file from a "
            f"copy, or begin another with {argument('ledger')} and a {argument('budget')} reduced by the ε that "
            "this ledger has recorded",
        )


def _training(entry: Mapping[str, Any]) -> TrainingCost:
    """Return the training of a line; raise ValueError or KeyError if it has none."""
    if not all(isinstance(entry[key], str) for key in ("time", "run", "claim")):
        raise ValueError("time, run and claim must be texts")
    return TrainingCost.model_validate(entry)


def _append(file: BinaryIO, content: LedgerContent, delta: float, line: Mapping[str, Any]) -> None:
    """Append a line; in an empty file, the line with the ledger's δ comes first."""
    lines = [line] if content.delta is not None else [{"version": VERSION, "delta": delta}, line]
    last = content.last
    for each in lines:
        new_line = digests.line_of(each, last)
        last = digests.check_line(new_line, last)
        file.write(new_line)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
