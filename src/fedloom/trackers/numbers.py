"""Base of trackers that receive numbers by round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedloom.engine.observer import RunObserver

if TYPE_CHECKING:
    from fedloom.runs.journal import Attempt


class NumberTracker(RunObserver, ABC):
    """Tracker that receives numbers by round, from training and from evaluations."""

    @abstractmethod
    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Record numbers of a round, by names such as ``train/loss`` and ``seen/accuracy_mean``."""

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Record the numbers of a round's training."""
        self.add(attempt.round, attempt_numbers(attempt))

    def evaluated(self, line: dict[str, Any]) -> None:
        """Record the numbers of an evaluation."""
        self.add(line["round"], evaluation_numbers(line))


def attempt_numbers(attempt: Attempt) -> dict[str, float]:
    """Return the numbers of a round: ``train/loss`` and other statistics, seconds, bytes."""
    numbers = {f"train/{name}": float(value) for name, value in attempt.statistics.items()}
    numbers["round/seconds"] = attempt.seconds
    numbers |= {f"round/{name}_s": seconds for name, seconds in attempt.phases.items()}
    for name in ("payload_up", "payload_down", "wire_up", "wire_down"):
        if (value := getattr(attempt, name)) is not None:
            numbers[f"round/{name}"] = float(value)
    return numbers


def evaluation_numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of an evaluation, named like ``seen/accuracy_mean``, without those of training."""
    numbers: dict[str, float] = {}
    for name, value in line.items():
        if name == "train" and not prefix:
            continue
        if isinstance(value, Mapping):
            numbers |= evaluation_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and (prefix or name != "round"):
            numbers[f"{prefix}{name}" if prefix else f"evaluation/{name}"] = float(value)
    return numbers
