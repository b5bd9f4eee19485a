"""Experiments that a member has approved or refused, or that wait for it; a file each, in the member's folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedloom.core import digests
from fedloom.core.files import make_private, read_file, storing, write_atomically
from fedloom.core.words import dotted_keys, parsed_json, printable, shortened
from fedloom.errors import DataError, ExperimentError

FOLDER = "experiments"
"""Subfolder of the member's folder."""

State = Literal["waiting", "approved", "refused"]
"""State of an experiment."""


def experiment_digest(shared: str) -> str:
    """Return the digest of an experiment from its shared part as JSON: every key counts."""
    return digests.short_digest(shared.encode())


@dataclass(frozen=True)
class KnownExperiment:
    """Experiment that an aggregator has asked for."""

    digest: str
    state: State
    experiment: Mapping[str, Any]
    aggregator: str
    since: float
    """Time of its state, in seconds since 1970."""


class Approvals:
    """Experiments in a member's folder. Other processes may change them at any time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def state(self, digest: str) -> State | None:
        """Return the state of an experiment; None if it has never been asked for."""
        path = self._path(digest)
        return self._read(path).state if path.exists() else None

    def ask(self, digest: str, shared: str, aggregator: str) -> State:
        """Return the state of an experiment, which waits from now on if it is new."""
        if (state := self.state(digest)) is not None:
            return state
        self._write(KnownExperiment(digest, "waiting", json.loads(shared), aggregator, time.time()))
        return "waiting"

    def decide(self, digest: str | None, state: State) -> KnownExperiment:
        """Approve or refuse the experiment whose digest begins with ``digest``; None: the only one that waits.

        Raise ExperimentError if there is no such experiment, or more than one.
        """
        waiting = [each for each in self.known() if (each.state == "waiting" if digest is None else True)]
        found = [each for each in waiting if each.digest.startswith(digest or "")]
        if len(found) != 1:
            known = ", ".join(f"{each.digest} ({each.state})" for each in self.known()) or "none"
            what = "that waits" if digest is None else f"whose digest begins with {digest!r}"
            raise ExperimentError(
                f"There must be exactly one experiment {what}; {self._folder} has {known}.", key="digest", found=digest
            )
        (one,) = found
        decided = KnownExperiment(one.digest, state, one.experiment, one.aggregator, time.time())
        self._write(decided)
        return decided

    def known(self) -> list[KnownExperiment]:
        """Return the experiments by time of their state."""
        paths = sorted(self._folder.glob("*.json")) if self._folder.is_dir() else []
        found = [self._read(path) for path in paths if re.fullmatch("[0-9a-f]{16}", path.stem)]
        return sorted(found, key=lambda each: each.since)

    def changes(self, experiment: Mapping[str, Any], digest: str) -> list[tuple[str, Any, Any]]:
        """Return the keys in which an experiment differs from the last approved one: key, value before, value after."""
        approved = [each for each in self.known() if each.state == "approved" and each.digest != digest]
        return list(experiment_differences(approved[-1].experiment if approved else {}, experiment))

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"

    def _read(self, path: Path) -> KnownExperiment:
        try:
            with storing(path, "read"):
                content = read_file(path)
            value = parsed_json(digests.without_digest(path.name, content))
            state: State = value["state"]
            if state not in ("waiting", "approved", "refused") or not isinstance(value["experiment"], dict):
                raise ValueError(f"state {state!r}")
            return KnownExperiment(path.stem, state, value["experiment"], str(value["aggregator"]), value["since"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: {error}", hint="delete it: the experiment then waits again") from None

    def _write(self, known: KnownExperiment) -> None:
        with storing(self._folder):
            make_private(self._folder)
        value = {key: getattr(known, key) for key in ("state", "since", "aggregator", "experiment")}
        path = self._path(known.digest)
        text = json.dumps(value, ensure_ascii=False, indent=2)
        write_atomically(path, digests.with_digest(path.name, text).encode(), private=True)


MISSING = object()
"""Value of a key that one of two experiments lacks."""


def experiment_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted keys whose values differ, with both values; :data:`MISSING` for a key that one side lacks."""
    old, new = dotted_keys(before), dotted_keys(after)
    for key in sorted({*old, *new}):
        pair = old.get(key, MISSING), new.get(key, MISSING)
        # True == 1 and 1 == 1.0, but these are different settings
        if json.dumps(pair[0], default=str) != json.dumps(pair[1], default=str):
            yield key, *pair


def shown(value: Any) -> str:
    """Return a value of an experiment on one line; an aggregator may have chosen it."""
    return "–" if value is MISSING else printable(shortened(json.dumps(value, ensure_ascii=False), 80))
