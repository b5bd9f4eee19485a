"""Standing of a federation: the numbers about it that every member is sent, without names of others."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import TypeAdapter

from fedloom.federation.activity import Activity, Phase

LONGEST = 4096
"""Maximum characters of a standing as JSON."""


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
        return _STANDING.validate_json(text)

    def to_json(self) -> str:
        """Return the standing as JSON."""
        return _STANDING.dump_json(self).decode()


_STANDING = TypeAdapter(Standing)
