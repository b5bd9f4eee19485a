"""Guard of a member against sums of the same answer over sets of clients that differ by a few.

A round that is repeated, because an attempt failed or the aggregator was restarted, has the same answers again. Of two
sums over sets that differ by one client, the difference is that client's answer. A member cannot know whether a failure
is real, so it bounds what repeated rounds can reveal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedloom.errors import RefusedError
from fedloom.privacy.settings import SMALLEST_SUM

MOST_IDS = 2_000_000
"""Number of client ids in remembered sets above which the oldest rounds are forgotten: some 100 MB."""

Subject = tuple[int, str, str]
"""Round, purpose, and answer that a sum is of."""


@dataclass
class _Revealed:
    """Sets of clients over which the sums of one subject were revealed, and for each client the places of its sets."""

    sets: list[frozenset[str]] = field(default_factory=list)
    places: dict[str, list[int]] = field(default_factory=dict)


class RevealedSums:
    """Sets of clients over which the clients of this process have helped to reveal sums."""

    def __init__(self) -> None:
        self._revealed: OrderedDict[Subject, _Revealed] = OrderedDict()
        self._ids = 0

    def check(self, client: str, subject: Subject, survivors: Sequence[str]) -> None:
        """Check that a client may help to reveal the sum over these clients, and remember it.

        The same set is allowed again, and one other set that differs by three clients or more.

        Raises
        ------
        RefusedError
            If it may not.
        """
        asked, revealed = frozenset(survivors), self._revealed.setdefault(subject, _Revealed())
        known = [revealed.sets[place] for place in revealed.places.get(client, ())]
        if asked in known:
            return
        if len(known) > 1 or any(len(asked ^ other) < SMALLEST_SUM for other in known):
            raise RefusedError(
                f"client {client} has helped to reveal a sum of round {subject[0]} already, over other clients; the "
                "difference of the two could reveal a single answer"
            )
        if asked not in revealed.sets:
            revealed.sets.append(asked)
            self._ids += len(asked)
        revealed.places.setdefault(client, []).append(revealed.sets.index(asked))
        while self._ids > MOST_IDS and len(self._revealed) > 1:
            _, oldest = self._revealed.popitem(last=False)
            self._ids -= sum(map(len, oldest.sets))
