"""The count of differentially private answers: written down before clients are asked for them, and never taken back.

A journal says what rounds are made of, and loses what runs again after a resume. What a client has told stays told. So
``releases.jsonl`` has a line for each exchange that asks for a private answer, and is not cut on resume: it counts
failed attempts, evaluations, rounds that were repeated, and clients that a restarted worker was asked for again.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.algorithms.base import Privacy
from fedloom.digests import RESTORE
from fedloom.errors import DataError
from fedloom.federation.carrier import ConversationKey
from fedloom.federation.folder import RELEASES, RunFolder

BEGIN = "begin"
"""In place of a purpose, in the first line: everything is counted from here on."""
BEFORE = "before"
"""In place of a purpose: there were rounds whose answers were not private, or were not counted."""

Keep = Callable[[Mapping[str, Any]], None]
"""Stores a line where another aggregator finds it."""


class Releases:
    """Writer of ``releases.jsonl`` for one aggregator's life.

    Parameters
    ----------
    folder
        The run's folder.
    promised
        Which answers are private, and with how much noise; None: none is.
    keep
        Where the run is published: called with each line before it takes effect.
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
        file.cut(whole[-1] if whole else 0)  # of a line that was cut short nothing has been told
        if promised is None or not whole:
            # The run may have been begun without private answers, or go on without them.
            is_new = promised is not None and not folder.has("journal.jsonl")
            self._write({"purpose": BEGIN if is_new else BEFORE, "noise_multiplier": 0.0, "clients": []})

    def tell(self, key: ConversationKey, exchange: int, clients: Sequence[str]) -> None:
        """Write down that these clients are about to tell something; it is on the disk when this returns.

        Raises
        ------
        StorageError
            If it cannot be written: then nothing may be asked.
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
class Told:
    """Private answers of each client that was ever in the run: how many, by their noise multiplier.

    ``is_known`` is False if some answers had no noise, or were not counted.
    """

    times: Mapping[str, Mapping[float, int]]
    is_known: bool


def told(folder: RunFolder, *, repeatable: bool) -> Told:
    """Return the private answers of each client.

    Parameters
    ----------
    repeatable
        Whether noise is the seed's: then a client that is asked the same again answers the same, which tells nothing
        more.

    Raises
    ------
    DataError
        If ``releases.jsonl`` is damaged.
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
    return Told(times, is_known)


def _lines(folder: RunFolder) -> Iterator[dict[str, Any]]:
    for line in folder.objects(RELEASES):
        match line:
            case {"purpose": str(), "noise_multiplier": int() | float() as z, "clients": list()} if z >= 0:
                yield line
            case _:
                raise DataError(f"{folder.path / RELEASES}: found a line that is not what FedLoom writes", hint=RESTORE)
