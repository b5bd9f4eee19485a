"""How counts are said, wherever a person reads them."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun, ``1 model``, ``2,000 models``, ``3 classes``: in the plural unless it is one."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
