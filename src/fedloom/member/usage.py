"""Record of a member's worker: bytes sent and received today, and the privacy that its clients have spent."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fedloom.core import digests
from fedloom.core.files import make_private, open_to_append, read_file, storing, write_atomically
from fedloom.core.words import parsed_json
from fedloom.errors import DataError
from fedloom.privacy.accounting import Release
from fedloom.privacy.settings import TrainingPrivacy
from fedloom.privacy.spent import TrainingCost

RECORD = "usage.json"
LOCK = "usage.lock"

AHEAD = 100
"""Parts of a day's limit that are recorded before they are used: few writes, and a kill forgets none."""

ROUNDS = 1000
"""Rounds whose bytes are counted, oldest first to be forgotten: an aggregator may name any round."""


class Usage:
    """Bytes of the day and by round, and releases by run and client; on disk if there is a folder. Thread-safe.

    Parameters
    ----------
    folder
        Folder of the record; None to forget it with this process.
    limit
        Bytes allowed per day, of which a kill counts up to a hundredth too much.
    now
        Local time.
    writes
        False to read the record of another process.

    Raises
    ------
    DataError
        If the folder's record is damaged, or another worker uses it.
    """

    def __init__(
        self,
        folder: Path | None,
        limit: int | None = None,
        now: Callable[[], datetime] = datetime.now,
        *,
        writes: bool = True,
    ) -> None:
        self._path = None if folder is None else folder / RECORD
        self._now = now
        self._ahead = (limit or 0) // AHEAD
        self._lock = threading.RLock()
        self._day, self._bytes, self._recorded = "", 0, 0
        self._rounds: dict[str, int] = {}
        self._spent: dict[str, dict[str, TrainingCost]] = {}
        self._held: int | None = None
        if folder is None:
            return
        if writes:
            self._hold(folder)
        self._read()

    def _hold(self, folder: Path) -> None:
        with storing(folder):
            make_private(folder)
            descriptor = open_to_append(folder / LOCK, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise DataError(
                f"another worker counts in {folder}; give each worker a folder of its own, or stop the other one."
            ) from None
        self._held = descriptor

    def close(self) -> None:
        """Let another worker use the folder."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def count(self, size: int) -> None:
        """Count bytes on the wire."""
        with self._lock:
            self._turn()
            self._bytes += size
            if self._bytes > self._recorded:
                self._recorded = self._bytes + self._ahead
                self._write(durably=False)

    def count_round(self, name: str, size: int, limit: int) -> int:
        """Count bytes of messages in a round, unless they exceed a limit; return the round's bytes with them."""
        with self._lock:
            if (used := self._rounds.get(name, 0) + size) <= limit:
                self._rounds[name] = used
                if len(self._rounds) > ROUNDS:
                    del self._rounds[next(iter(self._rounds))]
                self._write(durably=False)
            return used

    @property
    def today(self) -> int:
        """Bytes of this day."""
        with self._lock:
            self._turn()
            return self._bytes

    def spent(self, run: str, client: str) -> Counter[Release]:
        """Return the releases about a client in a run."""
        with self._lock:
            cost = self._spent.get(run, {}).get(client)
            return Counter() if cost is None else cost.counts

    def costs(self, client: str) -> dict[str, TrainingCost]:
        """Return the costs of a client by run."""
        with self._lock:
            return {run: clients[client] for run, clients in self._spent.items() if client in clients}

    def clients(self) -> list[str]:
        """Return the clients about whom something was released."""
        return sorted({client for clients in self._spent.values() for client in clients})

    def spend(self, run: str, client: str, privacy: TrainingPrivacy, counts: Mapping[Release, int]) -> None:
        """Record all releases about a client in a run; they are on disk when this returns."""
        with self._lock:
            self._spent.setdefault(run, {})[client] = TrainingCost.planned(privacy, counts)
            self._write()

    def _turn(self) -> None:
        if (day := self._now().date().isoformat()) != self._day:
            self._day, self._bytes, self._recorded = day, 0, 0

    def _read(self) -> None:
        assert self._path is not None
        if not self._path.exists():
            return
        try:
            with storing(self._path, "read"):
                value = parsed_json(digests.without_digest(RECORD, read_file(self._path)))
            self._day, self._bytes = str(value["day"]), int(value["bytes"])
            self._recorded = self._bytes
            self._rounds = {str(name): int(size) for name, size in value["rounds"].items()}
            self._spent = {
                run: {client: TrainingCost.model_validate(cost) for client, cost in clients.items()}
                for run, clients in value["spent"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self._path} is damaged: {error}", hint="restore it from a copy: without it, nothing spent is known"
            ) from None

    def _write(self, *, durably: bool = True) -> None:
        if self._path is None:
            return
        spent = {
            run: {client: cost.model_dump(mode="json") for client, cost in clients.items()}
            for run, clients in self._spent.items()
        }
        value: dict[str, Any] = {"day": self._day, "bytes": self._recorded, "rounds": self._rounds, "spent": spent}
        text = digests.with_digest(RECORD, json.dumps(value, indent=2))
        write_atomically(self._path, text.encode(), durably=durably, private=True)
