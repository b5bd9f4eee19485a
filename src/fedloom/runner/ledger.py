"""What a client has spent of its privacy, in a file of its own: the (ε, δ) of its requests add up."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from fedloom.errors import DataError, ExperimentError, StorageError, argument
from fedloom.runner.personal_model import Promise
from fedloom.storage.folder import PRIVATE_FILE
from fedloom.theory.privacy import gaussian_epsilon, together
from fedloom.words import parsed_json

VERSION = 1
"""Of a line of the file."""


class Ledger:
    """A file with one JSON object for each request that has told something of the data it stands for.

    It counts every request that names it, whatever data, server and round the request was about: two sets of data may
    share examples. Any number of processes may use it at once.

    Parameters
    ----------
    path
        The file; it is made, for its owner alone (0600), if it is not there. Its folder is.
    budget
        The largest ε that all requests may come to, at the δ of the one at hand; None: any.
    """

    def __init__(self, path: Path, budget: float | None = None) -> None:
        self._path = path
        self._budget = budget

    def spend(self, promise: Promise, **about: str) -> Promise:
        """Write down a request that is about to tell something, and return its promise with the total.

        It is on the disk when the call returns, so that a request that then fails has been counted.

        Raises
        ------
        ExperimentError
            If the total would exceed the budget; the file stays as it is.
        DataError
            If the file is not a ledger.
        StorageError
            If it cannot be written.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
            with os.fdopen(descriptor, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                before = list(self._multipliers(file))
                total = gaussian_epsilon(together([*before, promise.noise_multiplier]), promise.delta)
                if self._budget is not None and total > self._budget:
                    spent = gaussian_epsilon(together(before), promise.delta)
                    raise ExperimentError(
                        f"{argument('budget')} is {self._budget:g}, and with this request ε would be {total:.4g} at "
                        f"δ = {promise.delta:g} ({spent:.4g} after the {len(before)} before it in {self._path}).",
                        key="budget",
                        found=total,
                        hint=f"ask with a smaller {argument('epsilon')}, or accept a larger {argument('budget')}",
                    )
                line = {
                    "version": VERSION,
                    "time": datetime.now(UTC).isoformat(timespec="seconds"),
                    **about,
                    "epsilon": promise.epsilon,
                    "delta": promise.delta,
                    "noise_multiplier": promise.noise_multiplier,
                    "examples": promise.examples,
                }
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(
                f"{argument('ledger')}: {self._path} cannot be written: {(error.strerror or str(error)).lower()}; "
                "nothing was "
                "told",
                hint="give a file in a folder that is there, on a disk with room",
            ) from error
        return replace(promise, requests=len(before) + 1, total_epsilon=total)

    def _multipliers(self, file: BinaryIO) -> Iterator[float]:
        """z of each request before."""
        for number, line in enumerate(file, 1):
            try:
                said = parsed_json(line)
                version, z = said["version"], float(said["noise_multiplier"])
            except (ValueError, TypeError, KeyError):
                version, z = None, 0.0
            if version != VERSION or not 0 < z < math.inf or not line.endswith(b"\n"):
                shown = line[:80].decode(errors="replace").strip()
                raise DataError(
                    f"{self._path}, line {number}: found {shown!r}; allowed: a JSON object of a ledger, version "
                    f"{VERSION}, with a noise_multiplier above 0",
                    hint=f"give another file with {argument('ledger')}, or put this one right",
                )
            yield z
