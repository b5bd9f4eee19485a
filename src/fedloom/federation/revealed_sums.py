"""Guard of a member against sums of the same answer over sets of clients that differ by a few.

A round that is repeated, because an attempt failed or the aggregator was restarted, has the same answers again. Of two
sums over sets that differ by one client, the difference is that client's answer. A member cannot know whether a failure
is real, so it bounds what repeated rounds can reveal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fedloom.errors import RefusedError
from fedloom.privacy.settings import SMALLEST_SUM

MOST_KEPT = 100_000
"""Number of rounds and clients that are remembered."""

Subject = tuple[int, str, str]
"""Round, purpose, and answer that a sum is of."""


class RevealedSums:
    """Sets of clients over which the clients of this process have helped to reveal sums."""

    def __init__(self) -> None:
        self._sets: OrderedDict[tuple[str, Subject], list[frozenset[str]]] = OrderedDict()
        self._interned: dict[frozenset[str], frozenset[str]] = {}

    def check(self, client: str, subject: Subject, survivors: Sequence[str]) -> None:
        """Check that a client may help to reveal the sum over these clients, and remember it.

        The same set is allowed again, and one other set that differs by three clients or more.

        Raises
        ------
        RefusedError
            If it may not.
        """
        asked = frozenset(survivors)
        asked = self._interned.setdefault(asked, asked)
        known = self._sets.setdefault((client, subject), [])
        if asked in known:
            return
        if len(known) > 1 or any(len(asked ^ other) < SMALLEST_SUM for other in known):
            raise RefusedError(
                f"client {client} has helped to reveal a sum of round {subject[0]} already, over other clients; the "
                "difference of the two could reveal a single answer"
            )
        known.append(asked)
        while len(self._sets) > MOST_KEPT:
            self._sets.popitem(last=False)
