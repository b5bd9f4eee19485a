"""File of a client's privacy budget; it accumulates the (ε, δ) of its requests."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fedloom.core import digests
from fedloom.core.words import parsed_json
from fedloom.errors import DataError, ExperimentError, StorageError, argument
from fedloom.privacy.gaussian_mechanism import compose, gaussian_epsilon
from fedloom.runner.personal_model import PrivacyGuarantee
from fedloom.storage.folder import PRIVATE_FILE

VERSION = 2
KIND = "ledger"
"""Kind of the file in :mod:`fedloom.core.digests`."""


class PrivacyAccountant:
    """File with one JSON object per request that has released something about the client's data.

    The first line states the δ at which the total ε is computed: that of the first request. A later request with a
    larger δ, and less noise, therefore counts for more. The ledger counts every request that names it, whatever the
    data, server and round, since two data sets may share examples. Any number of processes may use it concurrently.

    Parameters
    ----------
    path
        Path of the file; created with mode 0600 if it does not exist. Its folder must exist.
    budget
        Maximum total ε at the ledger's δ; None: no limit.
    """

    def __init__(self, path: Path, budget: float | None = None) -> None:
        self._path = path
        self._budget = budget

    def charge(self, guarantee: PrivacyGuarantee, **about: str) -> PrivacyGuarantee:
        """Record a request before it releases anything; return its guarantee with the new total.

        The record is on disk when the call returns, so a request that fails later has been counted.

        Raise ExperimentError if the total would exceed the budget (the file is then unchanged); DataError if the file
        is not a ledger of this version, or is damaged; StorageError if it cannot be written.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
            with os.fdopen(descriptor, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                stated, before, last = self._read(file)
                delta = guarantee.delta if stated is None else stated
                total = gaussian_epsilon(compose([*before, guarantee.noise_multiplier]), delta)
                if self._budget is not None and total > self._budget:
                    spent = gaussian_epsilon(compose(before), delta)
                    raise ExperimentError(
                        f"{argument('budget')} is {self._budget:g}, and with this request ε would be {total:.4g} at "
                        f"the ledger's δ = {delta:g} ({spent:.4g} after the {len(before)} before it in {self._path}).",
                        key="budget",
                        found=total,
                        hint=f"use a smaller {argument('epsilon')}, or a larger {argument('budget')}",
                    )
                lines: list[dict[str, Any]] = [{"version": VERSION, "delta": delta}] if stated is None else []
                lines.append(
                    {
                        "version": VERSION,
                        "time": datetime.now(UTC).isoformat(timespec="seconds"),
                        **about,
                        "epsilon": guarantee.epsilon,
                        "delta": guarantee.delta,
                        "noise_multiplier": guarantee.noise_multiplier,
                        "examples": guarantee.examples,
                    }
                )
                for line in lines:
                    written = digests.line_of(line, last)
                    last = digests.check_line(written, last)
                    file.write(written)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(
                f"{argument('ledger')}: {self._path} cannot be written: {(error.strerror or str(error)).lower()}; "
                "nothing was released",
                hint="choose a file in an existing folder, on a disk with free space",
            ) from error
        return replace(guarantee, requests=len(before) + 1, total_epsilon=total, total_delta=delta)

    def _read(self, file: BinaryIO) -> tuple[float | None, list[float], str]:
        """Return the ledger's δ (None if empty), z of each earlier request, and the digest of the last line."""
        delta, multipliers, last = None, [], digests.beginning(KIND)
        for number, line in enumerate(file, 1):
            try:
                said = parsed_json(line)
                if said["version"] != VERSION:
                    raise self._refused(
                        number, f"its format is version {said['version']}, and this FedLoom reads version {VERSION}"
                    )
                last = digests.check_line(line, last)
                if delta is None:
                    delta = float(said["delta"])
                else:
                    multipliers.append(float(said["noise_multiplier"]))
            except digests.Damaged as error:
                raise self._refused(number, str(error)) from None
            except (ValueError, TypeError, KeyError):
                shown = line[:80].decode(errors="replace").strip()
                raise self._refused(number, f"{shown!r} is not a ledger line") from None
        return delta, multipliers, last

    def _refused(self, number: int, why: str) -> DataError:
        return DataError(
            f"{self._path}, line {number}: {why}",
            hint="if the last line is incomplete, delete it (nothing was released); otherwise restore the file from a "
            f"copy, or begin another with {argument('ledger')} and a {argument('budget')} reduced by the ε that "
            "this ledger has recorded",
        )
