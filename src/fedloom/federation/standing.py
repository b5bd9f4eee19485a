"""Standing of a federation: the numbers about it that every member is sent, without names of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from pydantic import TypeAdapter

from fedloom.core.words import pluralize
from fedloom.federation.activity import Activity, Phase

LONGEST = 4096
"""Maximum characters of a standing as JSON."""

LARGEST = 2**53
"""Largest number in a standing."""


@dataclass(frozen=True)
class Standing:
    """Numbers about a federation.

    Attributes
    ----------
    phase, round, rounds, doing
        As in :class:`~fedloom.federation.activity.Activity`.
    best_round
        Evaluated round with the best result on the clients' validation examples; None before the first.
    members, connected
        Number of clients in the roster, and of those that a connected worker serves.
    awaited
        Number of clients whose answers are awaited.
    remaining_s
        Seconds until the next of them counts as lost; None for never. Two standings that differ only in it are equal.
    """

    phase: Phase
    round: int = 0
    rounds: int | None = None
    doing: int | None = None
    best_round: int | None = None
    members: int = 0
    connected: int | None = None
    awaited: int = 0
    remaining_s: float | None = field(default=None, compare=False)

    @classmethod
    def from_activity(cls, now: Activity) -> Standing:
        """Return the standing in a live federation's state."""
        deadlines = [each.deadline for each in now.awaiting if each.deadline is not None]
        return cls(
            now.phase,
            now.round,
            now.rounds,
            now.doing,
            now.best_round,
            now.clients.roster,
            now.clients.connected,
            now.awaited,
            max(0.0, min(deadlines) - now.time) if deadlines else None,
        )

    @classmethod
    def parse(cls, text: str) -> Standing:
        """Parse the JSON of an aggregator; raise ValueError if it is too long or not a standing."""
        if len(text) > LONGEST:
            raise ValueError(f"the standing has {len(text)} characters; the limit is {LONGEST}")
        standing = _STANDING.validate_json(text)
        if any(isinstance(value, int | float) and not 0 <= value <= LARGEST for value in vars(standing).values()):
            raise ValueError(f"the numbers of a standing lie between 0 and {LARGEST}")
        return standing

    def to_json(self) -> str:
        """Return the standing as JSON."""
        return _STANDING.dump_json(self).decode()

    def in_words(self, at: float) -> str:
        """Return what the federation does, and what it waits for; ``at`` is the time of the standing, since 1970."""
        of = "" if self.rounds is None else f" of {self.rounds}"
        members = pluralize(self.members, "member")
        if self.connected is not None:
            members = f"{self.connected} of {members} connected"
        if self.phase == "waiting":
            words = f"waiting, {members}"
        elif self.phase == "training":
            words = f"training round {self.doing or self.round}{of}"
        else:
            words = f"{self.phase} after round {self.round}{of}"
        best = "" if self.best_round is None else f", best round {self.best_round}"
        return words + best + (f", {self.waits(at)}" if self.awaited else "")

    def waits(self, at: float) -> str:
        """Return whom the aggregator waits for, and until when; ``at`` is the time of the standing, since 1970."""
        text = f"waits for {self.awaited} of {pluralize(self.members, 'member')}"
        if self.remaining_s is None or self.remaining_s > 365 * 86_400:
            return text
        form = "%H:%M" if self.remaining_s < 86_400 else "%Y-%m-%d %H:%M"
        return f"{text} until {datetime.fromtimestamp(at + self.remaining_s):{form}}"


_STANDING = TypeAdapter(Standing)
