"""What tests ask of messages: that they name keys, values, files and what is allowed; the words around are free."""

from __future__ import annotations


def tells(text: str, *facts: object) -> bool:
    """Whether a message names these facts in this order."""
    at = 0
    for fact in map(str, facts):
        found = text.find(fact, at)
        if found < 0:
            return False
        at = found + len(fact)
    return True
