"""Digests inside the files of a run: what was changed since it was written is found when it is read.

A JSON object ends with the key ``digest``, every line of a file of lines ends with that key, and YAML begins with a
comment that holds it. A digest is that of the bytes around it, so that programs which do not know it (jq, pandas) read
the file as before. On a line it covers the digest of the line before, too: a line that was changed, removed, put in or
moved does not follow from its predecessor. A line that a crash cut short has no end, and so no digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from fedloom.errors import NEW_RUN

RESTORE = f"restore the file from a copy, or from where the run is published; or {NEW_RUN}"
"""What to do about a damaged file."""

VERSION = 1
"""Part of what the first digest of a file of lines covers."""
DIGITS = 16

_OF_LINE = re.compile(rb'"digest": "([0-9a-f]{16})"\}\n\Z')
_OF_OBJECT = re.compile(rb'"digest": "([0-9a-f]{16})"\n\}\n\Z')
_OF_COMPACT = re.compile(rb',"digest":"([0-9a-f]{16})"\}\Z')
TAIL = len('"digest": ""}\n') + DIGITS
"""Bytes at the end of a line that hold its digest."""
_COMMENT = "# digest {} of the lines below, by FedLoom. Remove this line after editing them.\n"
_OF_YAML = re.compile(_COMMENT.format("([0-9a-f]{16})").replace(".", r"\."))


class Damaged(ValueError):
    """Content that is not what its digest was made of."""


def digest_of(*parts: bytes) -> str:
    """Return the digest of some bytes, one part after another: the first 64 bits of their sha256, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:DIGITS]


# --- files of lines ---------------------------------------------------------------------------------------------------


def beginning(kind: str) -> str:
    """Return what stands for the digest of the line before the first, in a file of this kind."""
    return digest_of(f"fedloom {VERSION} {kind}".encode())


def line_of(value: Mapping[str, Any], before: str) -> bytes:
    """Return an object as the line that follows the line with the digest ``before``.

    It is in ASCII, so that nothing in it is taken for the end of the line.
    """
    body = json.dumps(value, allow_nan=False).encode()[:-1] + (b", " if value else b"")
    return b'%s"digest": "%s"}\n' % (body, digest_of(before.encode(), body).encode())


def said_by(line: bytes) -> str | None:
    """Return the digest at the end of a line, unchecked; None without one."""
    found = _OF_LINE.search(line[-TAIL:])
    return None if found is None else found[1].decode()


def check_line(line: bytes, before: str) -> str:
    """Return the digest of a line that ends, compared with its content and its predecessor.

    Raises
    ------
    Damaged
        If it has none, or another.
    """
    said = said_by(line)
    if said is None:
        raise Damaged("it has no digest: it was damaged, or written by another version of FedLoom")
    if digest_of(before.encode(), line[:-TAIL]) != said:
        raise Damaged("its digest is not that of its content after the line before: one of them was changed or lost")
    return said


# --- whole files ------------------------------------------------------------------------------------------------------


def sealed(name: str, text: str) -> str:
    """Return the content of a file of this name with its digest, where its format has a place for one.

    Parameters
    ----------
    text
        A JSON object, if the name ends in ``.json``; YAML, if in ``.yaml``; else it is returned as it is.
    """
    if name.endswith(".yaml"):
        return _COMMENT.format(digest_of(text.encode())) + text
    if not name.endswith(".json"):
        return text
    body = text.rstrip().removesuffix("}").rstrip()
    body += "\n  " if body == "{" else ",\n  "
    return f'{body}"digest": "{digest_of(body.encode())}"\n}}\n'


def unsealed(name: str, content: bytes) -> bytes:
    """Return the content of a file without its digest, which is compared.

    YAML whose first line is no comment has been edited, and is taken as it is.

    Raises
    ------
    Damaged
        If it is not what was written.
    """
    if name.endswith(".yaml"):
        return _without_comment(content)
    if not name.endswith(".json"):
        return content
    found = _OF_OBJECT.search(content)
    if found is None:
        raise Damaged("it has no digest: it was damaged, or written by another version of FedLoom")
    body = content[: found.start()]
    if digest_of(body) != found[1].decode():
        raise Damaged("its digest is not that of its content")
    return body.rstrip().removesuffix(b",") + b"\n}\n"


def sealed_compact(text: str) -> str:
    """Return a JSON object without spaces, which is not empty, with its digest as the last key."""
    body = text.removesuffix("}")
    return f'{body},"digest":"{digest_of(body.encode())}"}}'


def unsealed_compact(content: bytes) -> bytes:
    """Return such an object without its digest, which is compared.

    Raises
    ------
    Damaged
        If it is not what was written.
    """
    found = _OF_COMPACT.search(content)
    if found is None:
        raise Damaged("it has no digest")
    body = content[: found.start()]
    if digest_of(body) != found[1].decode():
        raise Damaged("its digest is not that of its content")
    return body + b"}"


def _without_comment(content: bytes) -> bytes:
    if not content.startswith(b"#"):
        return content
    first, end, rest = content.partition(b"\n")
    found = _OF_YAML.fullmatch((first + end).decode(errors="replace"))
    if found is None:
        raise Damaged("its first line is a comment, but not the one with the digest")
    if digest_of(rest) != found[1]:
        raise Damaged("its digest is not that of the lines below it (remove the first line if you have edited them)")
    return rest
