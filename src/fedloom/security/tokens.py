"""Tokens: secrets of 256 random bits, shown once; a file keeps their hashes.

A token is ``fedloom_ID_SECRET``. The id is not secret: it names the token in lists and logs, and selects the hash that
the secret is compared with in constant time. An unsalted, single-round hash suffices, since 256 bits cannot be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, Field, SecretStr, ValidationError

from fedloom.core.settings import Settings
from fedloom.data.folders import locked
from fedloom.errors import ExperimentError, RefusedError
from fedloom.experiment.validation_errors import abbreviated, explain, listing
from fedloom.security.files import read_text, write_private

SECRET_BYTES = 32
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""Pattern for names of identities and tokens."""

_TOKEN = re.compile(r"fedloom_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NOBODY = hashlib.sha256(b"").hexdigest()


class Token(Settings):
    """Stored record of a token."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    """12 hex digits."""
    name: str = Field(pattern=NAME)
    """Name of its owner; several tokens may share one, such as an old token and its replacement."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of its secret."""
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None

    def state(self, now: datetime) -> Literal["valid", "expired", "revoked"]:
        """Return the token's state at a time."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else "valid"


class _File(Settings):
    version: Literal[1]
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Tokens:
    """Tokens of a file, in order of creation."""

    all: tuple[Token, ...]

    def find(self, token: SecretStr) -> Token | None:
        """Return the record of a token, even if expired or revoked; None if it is not in the file.

        The duration does not depend on whether the id is known or how much of the secret is correct.
        """
        match = _TOKEN.fullmatch(token.get_secret_value())
        id, secret = match.groups() if match else ("", "")
        record = self.by_id(id)
        same = hmac.compare_digest(_hash(secret), _NOBODY if record is None else record.sha256)
        return record if same else None

    def by_id(self, id: str) -> Token | None:
        """Return the token with this id, if any."""
        return self._by_id.get(id)

    @cached_property
    def _by_id(self) -> dict[str, Token]:
        return {token.id: token for token in self.all}


def check_member_name(name: str, reserved_name: str = "") -> None:
    """Raise ExperimentError if a new identity or token may not have this name."""
    if not re.fullmatch(NAME, name) or name == reserved_name:
        but = f", and not {reserved_name}" if reserved_name else ""
        raise ExperimentError(
            f"NAME must be 1 to 128 letters, digits, and . _ -, starting with a letter or digit{but} "
            f"(got {abbreviated(name)}).",
            key="name",
            found=name,
        )


def token_id(token: SecretStr) -> str | None:
    """Return the id that a token claims, for logs; None if the text is not a token."""
    match = _TOKEN.fullmatch(token.get_secret_value())
    return match[1] if match else None


def contains_token(text: str) -> bool:
    """Return whether a text contains a token."""
    return _TOKEN.search(text) is not None


def make_token() -> SecretStr:
    """Return a new random token."""
    return SecretStr(f"fedloom_{secrets.token_hex(6)}_{secrets.token_urlsafe(SECRET_BYTES)}")


def keep_token(name: str, token: SecretStr, *, days: float | None = None) -> Token:
    """Return the record of a token that expires in ``days`` days from now, or never.

    Raise ValueError if the text is not a token.
    """
    match = _TOKEN.fullmatch(token.get_secret_value())
    if match is None:
        raise ValueError("not a token")
    now = datetime.now(UTC).replace(microsecond=0)
    expires = None if days is None else now + timedelta(days=days)
    return Token(id=match[1], name=name, sha256=_hash(match[2]), created=now, expires=expires)


def read_tokens(path: Path) -> Tokens:
    """Read a token file.

    Raise ExperimentError if it cannot be read, or was not written by ``fedloom token``.
    """
    text = read_text(path, "token file")
    try:
        value = json.loads(text)
        content = _File.model_validate_json(text)
    except ValidationError as error:
        errors = explain(error, _File.model_json_schema(), value)
        raise ExperimentError(listing(str(path), errors, {}), hint=_REPAIR) from None
    except (ValueError, RecursionError) as error:
        raise ExperimentError(f"{path} is damaged: not JSON ({_without_text(error)})", hint=_REPAIR) from None
    ids = [token.id for token in content.tokens]
    if len(set(ids)) < len(ids):
        raise ExperimentError(f"{path} is damaged: a token's id occurs twice", hint=_REPAIR)
    return Tokens(content.tokens)


_REPAIR = "restore it from a backup, or create another with `fedloom token new`"


def add_token(path: Path, name: str, *, days: float | None = None) -> tuple[SecretStr, Token]:
    """Create a token and store its hash in a file, which is created if necessary.

    Raise ExperimentError if the name is not allowed, or the file is damaged; it stays unchanged. Raise StorageError if
    it cannot be written.
    """
    check_member_name(name)
    with locked(path):
        tokens = read_tokens(path).all if path.exists() else ()
        token = make_token()
        entry = keep_token(name, token, days=days)
        _write(path, (*tokens, entry))
    return token, entry


def revoke_tokens(path: Path, name: str) -> list[Token]:
    """Revoke the token with an id, or all tokens with a name; return those newly revoked.

    Raise ExperimentError if there is no such token, or the file is damaged; it stays unchanged. Raise StorageError if
    it cannot be written.
    """
    with locked(path):
        tokens = read_tokens(path).all
        selected = [token for token in tokens if name in (token.id, token.name)]
        if not selected:
            names = ", ".join(dict.fromkeys(token.name for token in tokens)) or "none"
            raise ExperimentError(
                f"{path} has no token {abbreviated(name)}; give its id or its name ({names})", found=name
            )
        now = datetime.now(UTC).replace(microsecond=0)
        updates = {token.id: token.model_copy(update={"revoked": now}) for token in selected if token.revoked is None}
        if updates:
            _write(path, [updates.get(token.id, token) for token in tokens])
    return list(updates.values())


def read_secret(path: Path) -> SecretStr:
    """Read a worker's token from a file.

    Raise ExperimentError if the file cannot be read. Raise RefusedError if its content is not a token; the content is
    not shown.
    """
    return checked_token(read_text(path, "file with a token").strip(), str(path))


def checked_token(text: str, source: str) -> SecretStr:
    """Validate a token and return it.

    Raise RefusedError if it is not a token; the text is not shown.
    """
    if not _TOKEN.fullmatch(text):
        raise RefusedError(
            f"{source} has {len(text)} characters, which are not a valid token",
            hint="create one with `fedloom token new NAME`",
        )
    return SecretStr(text)


def _write(path: Path, tokens: Sequence[Token]) -> None:
    content = _File(version=1, tokens=tuple(tokens)).model_dump(mode="json")
    write_private(path, json.dumps(content, indent=1) + "\n")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _without_text(error: BaseException) -> str:
    """Describe an error in a JSON document without quoting the document."""
    return f"{error.msg}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else type(error).__name__
