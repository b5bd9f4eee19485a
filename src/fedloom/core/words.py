"""Formatting of counts, tables and untrusted text, shared by the whole package."""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_FLOOR, Decimal
from typing import Any

from fedloom.errors import without_secrets

DEEPEST = 50
"""Maximum nesting of lists and objects in JSON from a peer."""

REASON_CHARACTERS = 300
"""Maximum length of an untrusted reason, in characters."""


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, in the plural unless it is one: ``1 model``, ``2,000 models``, ``3 classes``."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def duration(seconds: float) -> str:
    """Return a readable duration: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``5 d 3 h``."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def rounded_up(bound: float, digits: int = 3) -> str:
    """Return an upper bound, such as an ε, rounded up to this many digits; a relative excess of 10⁻⁶ is ignored."""
    text_shown = f"{bound:.{digits}g}"
    if not math.isfinite(bound) or bound * (1 - 1e-6) <= float(text_shown):
        return text_shown
    nearest = Decimal(text_shown)
    return f"{float(nearest + Decimal(1).scaleb(nearest.adjusted() - digits + 1)):.{digits}g}"


def rounded_down(bound: float, digits: int = 3) -> str:
    """Return a lower bound, rounded down to this many digits; a relative shortfall of 10⁻⁶ is ignored."""
    if not math.isfinite(bound):
        return f"{bound:g}"
    value = Decimal(bound * (1 + 1e-6))
    lower = value.quantize(Decimal(1).scaleb(value.adjusted() - digits + 1), ROUND_FLOOR)
    return f"{float(lower):.{digits}g}"


def printable(text: str, limit: int | None = None, keep: str = "") -> str:
    r"""Return at most ``limit`` characters of a text, made safe for logs, terminals and JSON Lines files.

    Characters that do not print (control characters, line separators, terminal escapes, bidirectional marks) become
    escapes such as ``\x1b``, except for those in ``keep``. User information in URLs is removed.
    """
    text = without_secrets(text)[:limit]
    characters = (c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
    return "".join(characters)[:limit]


def composed(text: str) -> str:
    """Return a text in Unicode's composed form (NFC): macOS writes ``é`` as two characters, other systems as one."""
    return unicodedata.normalize("NFC", text)


def named_twice(names: Sequence[str]) -> str | None:
    """Return the first name that occurs twice, in any Unicode form; None if all are different."""
    seen: set[str] = set()
    for name in map(composed, names):
        if name in seen:
            return name
        seen.add(name)
    return None


def first_of(names: Sequence[str], most: int = 12) -> str:
    """Return the first of some names for a message, and the number of the others: ``a, b and 7 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shortened(text: str, most: int = 60) -> str:
    """Return a text as part of one line, truncated to ``most`` characters, without user information in URLs."""
    line = " ".join(without_secrets(text).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def first_sentence(docstring: str) -> str:
    """Return the first paragraph of a docstring, which is a sentence, in one line and without marks of code."""
    return " ".join(docstring.strip().split("\n\n")[0].split()).replace("``", "")


def parsed_json(text: str | bytes, deepest: int | None = None) -> Any:
    """Return the value of a JSON text.

    Raise ValueError if it is not JSON, is nested too deeply, or has a number that is not finite; or, from a peer, if it
    has an unpaired surrogate (``\\ud800``), which no terminal can show.

    Parameters
    ----------
    deepest
        Maximum nesting of lists and objects, for input from a peer; None for no limit but Python's.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if deepest is not None:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("lists and objects nested too deeply") from None
    level: list[Any] = [value]
    for _ in range(deepest or 0):
        level = [inner for each in level for inner in _inside(each)]
    if deepest is not None and any(isinstance(each, dict | list) for each in level):
        raise ValueError(f"lists and objects nested more than {deepest} deep")
    return value


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def dotted_keys(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key."""
    result: dict[str, Any] = {}
    for key, item in value.items():
        result |= dotted_keys(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return result


def shortest_suffixes(keys: Sequence[str]) -> list[str]:
    """Return for each dotted key its shortest suffix that no other key ends in; the whole key if there is none."""
    suffixes = []
    for i, key in enumerate(keys):
        steps = key.split(".")
        others = [other.split(".") for j, other in enumerate(keys) if j != i]
        lengths = (n for n in range(1, len(steps)) if all(other[-n:] != steps[-n:] for other in others))
        suffixes.append(".".join(steps[-next(lengths, len(steps)) :]))
    return suffixes


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the same columns as CSV text with a header line; empty text if there are no rows."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
