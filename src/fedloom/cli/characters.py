"""Replacement of characters that standard output cannot encode."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

PLAIN = {
    "±": "+/-", "·": "-", "–": "-", "—": "-", "−": "-", "→": "->", "×": "x", "…": "...", "≤": "<=", "≥": ">=",
    "Δ": "d", "θ": "theta", "η": "eta", "λ": "lambda", "μ": "mu", "ρ": "rho", "α": "alpha", "“": '"', "”": '"',
}  # fmt: skip

_HANDLER = "fedloom"


def write_anything() -> None:
    """Make standard output and error replace characters that their encoding lacks (LANG=C, ASCII)."""
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors=_HANDLER)


def shown_as(encoding: str, text: str) -> str:
    """Return a text as it appears in an encoding, for the layout of tables."""
    codecs.register_error(_HANDLER, _replace)
    return text.encode(encoding, _HANDLER).decode(encoding)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    """Return a replacement: ``+/-`` for ``±``, ``e`` for ``é``, ``?`` for characters without an ASCII equivalent."""
    if character in PLAIN:
        return PLAIN[character]
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or "?"
