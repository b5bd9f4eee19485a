"""Identity file: maps certificates and tokens to identities, their roles, and the clients that they may act for."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.experiment.validation_errors import KeyPath, SettingError, abbreviated, explain, listing
from fedloom.experiment.yaml_reader import parse_yaml
from fedloom.security.files import read_text
from fedloom.security.tokens import NAME, contains_token

CHARACTER = "[A-Za-z0-9._-]"
"""Characters allowed in client ids, as a regular expression."""

MAX_CLIENTS = 1_000
"""Default limit on announced clients for an identity whose clients are given by a pattern."""


class Role(StrEnum):
    """Role of an identity."""

    WORKER = "worker"
    OBSERVER = "observer"
    PERSONALIZE = "personalize"
    WATCH = "watch"
    ADMIN = "admin"


class Action(StrEnum):
    """Action that a peer requests; a transport maps each of its calls to one."""

    TRAIN = "train clients"
    MEASURE = "evaluate clients"
    PERSONALIZE = "request a client's model"
    WATCH = "watch the run"
    CONTROL = "control the federation"


ALLOWED: Mapping[Role, frozenset[Action]] = {
    Role.WORKER: frozenset({Action.TRAIN, Action.MEASURE}),
    Role.OBSERVER: frozenset({Action.MEASURE}),
    Role.PERSONALIZE: frozenset({Action.PERSONALIZE}),
    Role.WATCH: frozenset({Action.WATCH}),
    Role.ADMIN: frozenset({Action.WATCH, Action.CONTROL}),
}
"""Actions that each role allows; all others are refused."""

WITH_CLIENTS = frozenset({Role.WORKER, Role.OBSERVER, Role.PERSONALIZE})
"""Roles that act for clients."""


class IdentityEntry(Settings):
    """Entry of the identity file."""

    name: str = Field(pattern=NAME, description="Name in logs, lists and the journal.")
    certificate: str | None = Field(
        default=None,
        pattern=r"^(URI|DNS):[!-~]{1,512}$",
        description="Subject alternative name of its certificates: URI:... or DNS:...",
    )
    token: str | None = Field(default=None, pattern=NAME, description="Name of its tokens.")
    roles: tuple[Role, ...] = Field(min_length=1, description="Roles, which decide its permissions.")
    clients: tuple[str, ...] = Field(
        default=(), description="Ids of the clients that it may act for; * matches any characters, ? one."
    )
    max_clients: int | None = Field(
        default=None,
        ge=1,
        description="Clients with data of their own that its connected workers may announce, all together; by default "
        f"as many as `clients` lists, and {MAX_CLIENTS:,} at least where that has a pattern.",
    )

    @cached_property
    def identity(self) -> Identity:
        """Identity of the entry."""
        listed = len(self.clients)
        most = max(listed, MAX_CLIENTS) if any(re.search(r"[*?]", each) for each in self.clients) else listed
        return Identity(self.name, frozenset(self.roles), self.clients, self.max_clients or most)


class _Table(Settings):
    version: Literal[1]
    identities: tuple[IdentityEntry, ...]


@dataclass(frozen=True)
class Identity:
    """Identity of a peer."""

    name: str
    """Name, unique in the federation."""
    roles: frozenset[Role]
    """Roles, which decide its permissions."""
    clients: tuple[str, ...] = ()
    """Patterns of the client ids that it may act for."""
    max_clients: int | None = None
    """Maximum number of clients with data of their own that its workers may announce; None for no limit."""

    def may(self, action: Action) -> bool:
        """Return whether one of its roles allows this action."""
        return any(action in ALLOWED[role] for role in self.roles)

    def speaks_for(self, client: str) -> bool:
        """Return whether it may announce this client and answer for it."""
        return self._pattern.fullmatch(client) is not None

    def foreign(self, clients: Iterable[str]) -> list[str]:
        """Return the given clients that it may not act for, in the given order."""
        return [client for client in clients if not self.speaks_for(client)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(_expression, self.clients)) or r"(?!)")


def _expression(pattern: str) -> str:
    """Return a pattern of ids as a regular expression that matches in linear time.

    Each piece between two stars matches at its first occurrence, without backtracking (an atomic group): if the rest
    does not match after that occurrence, it does not match after a later one either.
    """
    pieces = ["".join(CHARACTER if c == "?" else re.escape(c) for c in piece) for piece in re.split(r"\*+", pattern)]
    if len(pieces) == 1:
        return pieces[0]
    first, *inner, last = pieces
    return first + "".join(f"(?>{CHARACTER}*?{piece})" for piece in inner) + f"{CHARACTER}*{last}"


@dataclass(frozen=True)
class Identities:
    """Identities of an identity file."""

    entries: tuple[IdentityEntry, ...]

    def find(self, names: frozenset[str], token: str | None) -> list[Identity]:
        """Return the identities that match a certificate's subject alternative names and a token's name.

        An identity with both credentials requires both, and takes precedence over identities with one. If several are
        returned, the credentials match several identities equally well.
        """
        by_certificate, by_token = self._by_credential
        presented = [entry for name in names for entry in by_certificate.get(name, ())] + by_token.get(token, [])
        matching = [entry for entry in presented if entry.token in (None, token)]
        both = [entry for entry in matching if entry.certificate is not None and entry.token is not None]
        return [entry.identity for entry in both or matching]

    @cached_property
    def _by_credential(self) -> tuple[dict[str, list[IdentityEntry]], dict[str | None, list[IdentityEntry]]]:
        by_certificate: dict[str, list[IdentityEntry]] = {}
        by_token: dict[str | None, list[IdentityEntry]] = {}
        for entry in self.entries:
            if entry.certificate is not None:
                by_certificate.setdefault(entry.certificate, []).append(entry)
            else:
                by_token.setdefault(entry.token, []).append(entry)
        return by_certificate, by_token


def read_identities(path: Path) -> Identities:
    """Read an identity file: YAML, with ``version: 1`` and ``identities``, a list of :class:`IdentityEntry`.

    Raise ExperimentError if it cannot be read or is invalid; the message lists every error with its line.
    """
    text = read_text(path, "identity file")
    if contains_token(text):  # unlike other errors, not quoted
        raise ExperimentError(
            f"{path} contains a token; give the name of the token instead.",
            hint=(
                "anyone who can read this file can use the token: revoke it (`fedloom token revoke`) and create another"
            ),
        )
    value, origins = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        raise ExperimentError(f"{path} must be a mapping with the keys version, identities")
    try:
        table = _Table.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        errors = explain(error, _Table.model_json_schema(), value)
    else:
        errors = _errors(table.identities)
    if errors:
        raise ExperimentError(listing(str(path), errors, origins))
    return Identities(table.identities)


def _errors(entries: Sequence[IdentityEntry]) -> list[SettingError]:
    """Return the errors that the schema does not cover, such as missing or duplicate credentials."""
    found: list[SettingError] = []
    names = Counter(entry.name for entry in entries)
    credentials = Counter((entry.certificate, entry.token) for entry in entries)
    for i, entry in enumerate(entries):
        here: KeyPath = ("identities", i)
        if names[entry.name] > 1:
            found.append(SettingError((*here, "name"), f"{entry.name} is the name of {names[entry.name]} identities"))
        if entry.certificate is None and entry.token is None:
            found.append(SettingError(here, "give a certificate, a token or both"))
        elif credentials[entry.certificate, entry.token] > 1:
            given = " and ".join(filter(None, (entry.certificate, entry.token and f"token {entry.token}")))
            found.append(SettingError(here, f"{given} also belongs to another identity"))
        found += [SettingError((*here, "clients", *at), text) for at, text in _client_errors(entry)]
    return found


def _client_errors(entry: IdentityEntry) -> Iterator[tuple[KeyPath, str]]:
    roles = frozenset(entry.roles)
    if roles & WITH_CLIENTS and not entry.clients:
        yield (), f'role {", ".join(sorted(roles & WITH_CLIENTS))} needs ids or patterns of clients (["*"] matches all)'
    if entry.clients and not roles & WITH_CLIENTS:
        role = ", ".join(sorted(roles))
        yield (), f"role {role} cannot have clients; only worker, observer and personalize can"
    for i, pattern in enumerate(entry.clients):
        if not re.fullmatch(r"[A-Za-z0-9._*?-]{1,128}", pattern):
            yield (i,), f"{abbreviated(pattern)} is not a pattern; use up to 128 letters, digits, and . _ - * ?"
