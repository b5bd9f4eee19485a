"""Record of differentially private answers, written before clients are asked and never undone.

The journal lists the rounds that count, and loses those that run again after a resume. Released answers stay released,
so ``releases.jsonl`` has a line for each exchange that asks for a private answer, and is not cut on resume: it counts
failed attempts, evaluations, repeated rounds, and clients asked again after a worker restart.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.algorithms.base import Privacy
from fedloom.core.digests import RESTORE
from fedloom.errors import DataError
from fedloom.federation.transport import ConversationKey
from fedloom.runs.files import RELEASES
from fedloom.runs.folder import RunFolder

BEGIN = "begin"
"""Purpose in the first line: everything after it is counted."""
BEFORE = "before"
"""Purpose that marks earlier rounds whose answers were not private, or were not counted."""

Keep = Callable[[Mapping[str, Any]], None]
"""Function that stores a line where other aggregators can read it."""


class Releases:
    """Writer of ``releases.jsonl`` for the lifetime of one aggregator.

    ``promised`` are the private answers and their noise; None if no answers are private. For a published run, ``keep``
    is called with each line before it takes effect.
    """

    def __init__(self, folder: RunFolder, promised: Privacy | None, keep: Keep | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._lock = threading.Lock()
        self._life = uuid.uuid4().hex
        self._written = 0
        self.noise_multiplier = 0.0 if promised is None else promised.noise_multiplier
        self.covers: Collection[str] = () if promised is None else promised.covers
        file = folder.line_file(RELEASES)
        whole = [line.end for line in file.forwards() if line.whole]
        file.cut(whole[-1] if whole else 0)  # a line that was cut short belongs to a request that was never sent
        if promised is None or not whole:
            # The run may have begun without private answers, or continue without them.
            is_new = promised is not None and not folder.has("journal.jsonl")
            self._write({"purpose": BEGIN if is_new else BEFORE, "noise_multiplier": 0.0, "clients": []})

    def tell(self, key: ConversationKey, exchange: int, clients: Sequence[str]) -> None:
        """Record that these clients are about to answer; the line is durable when this returns.

        Raise StorageError if it cannot be written; the clients must then not be asked.
        """
        at = {"round": key.round, "attempt": key.attempt, "conversation": key.conversation, "exchange": exchange}
        about = {"purpose": key.purpose, "noise_multiplier": self.noise_multiplier}
        self._write({**at, **about, "clients": list(clients)})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            self._written += 1
            line = {**line, "life": self._life, "number": self._written}
            self._folder.append(RELEASES, line)
            self._folder.sync(RELEASES)
            if self._keep is not None:
                self._keep(line)


@dataclass(frozen=True)
class ReleaseCounts:
    """Number of private answers of each client that was ever in the run, by noise multiplier.

    ``is_known`` is False if some answers had no noise, or were not counted.
    """

    times: Mapping[str, Mapping[float, int]]
    is_known: bool


def count_releases(folder: RunFolder, *, repeatable: bool) -> ReleaseCounts:
    """Return the private answers of each client.

    It is ``repeatable`` if the noise is derived from the seed: repeating a request then gives the same answer, which
    reveals nothing more.

    Raise DataError if ``releases.jsonl`` is damaged.
    """
    times: defaultdict[str, Counter[float]] = defaultdict(Counter)
    asked: set[tuple[Any, ...]] = set()
    is_known = True
    for line in _lines(folder):
        is_known = is_known and line["purpose"] != BEFORE
        what = tuple(line.get(key) for key in ("purpose", "round", "attempt", "conversation", "exchange"))
        if not (repeatable and what in asked):
            asked.add(what)
            for client in line["clients"]:
                times[client][line["noise_multiplier"]] += 1
    return ReleaseCounts(times, is_known)


def _lines(folder: RunFolder) -> Iterator[dict[str, Any]]:
    for line in folder.objects(RELEASES):
        match line:
            case {"purpose": str(), "noise_multiplier": int() | float() as z, "clients": list()} if z >= 0:
                yield line
            case _:
                raise DataError(f"{folder.path / RELEASES} has a line not written by FedLoom.", hint=RESTORE)
