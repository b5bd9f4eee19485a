"""Digests inside the files of a run, which let readers detect changes.

In a JSON object and on every line of a JSON Lines file, ``digest`` is the last key. YAML begins with a comment that
holds the digest. A digest covers the bytes around it, so programs that do not check it (jq, pandas) read the file as
before. On a line it also covers the previous line's digest: a line that was changed, removed, inserted or moved breaks
the chain. A line cut short by a crash has no end, and therefore no digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from fedloom.errors import NEW_RUN

RESTORE = f"restore the file from a copy, or from where the run is published; or {NEW_RUN}"
"""Advice for a damaged file."""

VERSION = 1
"""Format version, covered by the first digest of a JSON Lines file."""
DIGITS = 16

_OF_LINE = re.compile(rb'"digest": "([0-9a-f]{16})"\}\n\Z')
_OF_OBJECT = re.compile(rb'"digest": "([0-9a-f]{16})"\n\}\n\Z')
_OF_COMPACT = re.compile(rb',"digest":"([0-9a-f]{16})"\}\Z')
TAIL = len('"digest": ""}\n') + DIGITS
"""Bytes at the end of a line that hold its digest, including the line end."""
_COMMENT = "# digest {} of the lines below, by FedLoom. Remove this line after editing them.\n"
_OF_YAML = re.compile(_COMMENT.format("([0-9a-f]{16})").replace(".", r"\."))


class Damaged(ValueError):
    """Content that does not match its digest."""


def short_digest(*parts: bytes) -> str:
    """Return the digest of the concatenated parts: the first 64 bits of their SHA-256, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:DIGITS]


# --- files of lines ---------------------------------------------------------------------------------------------------


def beginning(kind: str) -> str:
    """Return the digest that precedes the first line of a file of this kind."""
    return short_digest(f"fedloom {VERSION} {kind}".encode())


def line_of(value: Mapping[str, Any], previous: str) -> bytes:
    """Return an object as the line that follows the line with digest ``previous``.

    The line is ASCII, so nothing in it can be mistaken for a line end.
    """
    body = json.dumps(value, allow_nan=False).encode()[:-1] + (b", " if value else b"")
    return b'%s"digest": "%s"}\n' % (body, short_digest(previous.encode(), body).encode())


def stated_digest(line: bytes) -> str | None:
    """Return the digest at the end of a line, unchecked; None if it has none."""
    match = _OF_LINE.search(line[-TAIL:])
    return None if match is None else match[1].decode()


def check_line(line: bytes, previous: str) -> str:
    """Check a complete line against its content and its predecessor, and return its digest.

    Raise Damaged if the line has no digest, or a wrong one.
    """
    digest = stated_digest(line)
    if digest is None:
        raise Damaged("it has no digest; another version of FedLoom may have written it")
    if short_digest(previous.encode(), line[:-TAIL]) != digest:
        raise Damaged("its digest does not match its content and the previous line: one of them was changed or lost")
    return digest


# --- whole files ------------------------------------------------------------------------------------------------------


def with_digest(name: str, text: str) -> str:
    """Return the content of a file of this name with its digest, if its format has a place for one.

    Parameters
    ----------
    text
        A JSON object if the name ends in ``.json``, YAML if in ``.yaml``. Any other text is returned unchanged.
    """
    if name.endswith(".yaml"):
        return _COMMENT.format(short_digest(text.encode())) + text
    if not name.endswith(".json"):
        return text
    body = text.rstrip().removesuffix("}").rstrip()
    body += "\n  " if body == "{" else ",\n  "
    return f'{body}"digest": "{short_digest(body.encode())}"\n}}\n'


def without_digest(name: str, content: bytes) -> bytes:
    """Check the digest of a file's content and return the content without it.

    YAML whose first line is not a comment has been edited, and is returned unchanged.

    Raise Damaged if the content is not what was written.
    """
    if name.endswith(".yaml"):
        return _without_comment(content)
    if not name.endswith(".json"):
        return content
    return _checked(content, _OF_OBJECT).rstrip().removesuffix(b",") + b"\n}\n"


def with_compact_digest(text: str) -> str:
    """Return a nonempty JSON object without spaces, with its digest as the last key."""
    body = text.removesuffix("}")
    return f'{body},"digest":"{short_digest(body.encode())}"}}'


def without_compact_digest(content: bytes) -> bytes:
    """Check the digest of such an object and return the object without it.

    Raise Damaged if the content is not what was written.
    """
    return _checked(content, _OF_COMPACT) + b"}"


def _checked(content: bytes, pattern: re.Pattern[bytes]) -> bytes:
    """Return the content before the ending that holds its digest; raise Damaged if the digest is absent or wrong."""
    match = pattern.search(content)
    if match is None:
        raise Damaged("it has no digest; another version of FedLoom may have written it")
    body = content[: match.start()]
    if short_digest(body) != match[1].decode():
        raise Damaged("its digest does not match its content")
    return body


def _without_comment(content: bytes) -> bytes:
    if not content.startswith(b"#"):
        return content
    first, end, rest = content.partition(b"\n")
    match = _OF_YAML.fullmatch((first + end).decode(errors="replace"))
    if match is None:
        raise Damaged("its first line is a comment, but not the one with the digest")
    if short_digest(rest) != match[1]:
        raise Damaged("its digest does not match the lines below it (remove the first line if you have edited them)")
    return rest


def combined_digest(*parts: bytes | str | float) -> bytes:
    """Return the SHA-256 of a sequence of values; equal digests mean equal sequences."""
    parts_encoded = (part if isinstance(part, bytes) else repr(part).encode() for part in parts)
    return hashlib.sha256(b"fedloom question 1" + b"".join(map(length_prefixed, parts_encoded))).digest()


def length_prefixed(part: bytes) -> bytes:
    """Return bytes preceded by their length, so that a sequence of them has one reading."""
    return len(part).to_bytes(8, "big") + part
