"""Access control: identities with their roles and clients, and the credentials by which an aggregator knows peers.

The identity file maps certificates and tokens to identities.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError

from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.experiment.validation_errors import KeyPath, SettingError, abbreviated, explain, listing
from fedloom.experiment.yaml_reader import parse_yaml
from fedloom.security.certificates import Certificate, validity
from fedloom.security.files import ReloadingFile, read_text
from fedloom.security.tokens import NAME, Token, Tokens, contains_token, keep_token, read_tokens, token_id

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
        client_count = len(self.clients)
        most = (
            max(client_count, MAX_CLIENTS) if any(re.search(r"[*?]", each) for each in self.clients) else client_count
        )
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
    errors: list[SettingError] = []
    names = Counter(entry.name for entry in entries)
    credentials = Counter((entry.certificate, entry.token) for entry in entries)
    for i, entry in enumerate(entries):
        path: KeyPath = ("identities", i)
        if names[entry.name] > 1:
            errors.append(SettingError((*path, "name"), f"{entry.name} is the name of {names[entry.name]} identities"))
        if entry.certificate is None and entry.token is None:
            errors.append(SettingError(path, "give a certificate, a token or both"))
        elif credentials[entry.certificate, entry.token] > 1:
            entry_text = " and ".join(filter(None, (entry.certificate, entry.token and f"token {entry.token}")))
            errors.append(SettingError(path, f"{entry_text} also belongs to another identity"))
        errors += [SettingError((*path, "clients", *subpath), text) for subpath, text in _client_errors(entry)]
    return errors


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


@dataclass(frozen=True)
class PeerCredentials:
    """Credentials that a peer presents: a certificate, a token, both or neither."""

    certificate: Certificate | None = None
    token: SecretStr | None = None


@dataclass(frozen=True)
class Admitted:
    """Admitted peer, and its credentials."""

    identity: Identity
    certificate: Certificate | None
    token: Token | None

    @property
    def ends(self) -> datetime | None:
        """Expiry of the credentials; None if they never expire."""
        ends = [
            None if self.certificate is None else self.certificate.ends,
            None if self.token is None else self.token.expires,
        ]
        return min((end for end in ends if end is not None), default=None)

    @property
    def credential(self) -> str:
        """Credentials of the peer, for the audit log."""
        parts = [] if self.certificate is None else [f"certificate {self.certificate.fingerprint[:16]}"]
        return " and ".join(parts + ([] if self.token is None else [f"token {self.token.id}"]))


class Denied(Exception):
    """The peer is not admitted, or lacks a permission.

    Parameters
    ----------
    reason
        Sentence that may be shown to the peer.
    identity
        Identity of the peer; None if it is unknown.
    retries
        True if the peer should reconnect: its permissions have changed, or a newer certificate may be in place already.
    final
        True if its token is revoked or has expired, which no other file can change. An unknown token or certificate may
        be in a file that is about to be replaced.
    """

    def __init__(
        self, reason: str, identity: Identity | None = None, *, retries: bool = False, final: bool = False
    ) -> None:
        super().__init__(reason)
        self.identity = identity
        self.retries = retries
        self.final = final


SHARED = Identity("shared-token", frozenset({Role.WORKER, Role.PERSONALIZE, Role.WATCH}), ("*",))
"""Identity of the shared token, which is in no file and may act for every client.

Without an identity file, every peer with a known credential has the same permissions.
"""


class Access:
    """Access rules, read from files that are reloaded when they change.

    Any thread may use it. Peers are refused before any content of a message is read.

    Parameters
    ----------
    tokens
        Token file; None if there is none.
    identities
        Identity file. With None, any peer with a certificate of our CA or a known token may be a worker for every
        client, request every client's model, and watch.
    shared
        Token that is in no file, shared by our own workers and by peers that watch them or request models; the
        identity file does not apply to it.
    now
        Returns the current time in UTC.

    Raises
    ------
    ExperimentError
        If a file cannot be read or is invalid.
    """

    def __init__(
        self,
        tokens: Path | None = None,
        identities: Path | None = None,
        *,
        shared: SecretStr | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._now = now
        self._tokens = ReloadingFile([tokens], lambda: read_tokens(tokens)) if tokens is not None else None
        self._table = (
            ReloadingFile([identities], lambda: read_identities(identities)) if identities is not None else None
        )
        self._shared = Tokens(() if shared is None else (keep_token(SHARED.name, shared),))

    @property
    def takes_tokens(self) -> bool:
        """True if peers may present a token."""
        return self._tokens is not None or bool(self._shared.all)

    @property
    def stale(self) -> bool:
        """True if a file has changed since it was last checked; costs one ``stat`` per file."""
        return any(file.stale for file in self._files)

    def refresh(self) -> dict[Path, int]:
        """Reload changed files; return the number of changes of each file so far."""
        for file in self._files:
            file.refresh()
        return self.versions

    @property
    def versions(self) -> dict[Path, int]:
        """Number of changes of each file so far, as of the last reload."""
        return {path: file.version for file in self._files for path in file.paths}

    @property
    def _files(self) -> list[ReloadingFile[Any]]:
        return [file for file in (self._tokens, self._table) if file is not None]

    def admit(self, presented: PeerCredentials, action: Action) -> Admitted:
        """Return the admitted peer.

        Raise Denied if the peer is unknown, its credentials are invalid or have expired, or none of its roles allows
        the action.
        """
        token = None if presented.token is None else self._find(presented.token)
        admission = self._known(presented.certificate, token)
        _require(admission.identity, action)
        return admission

    def check(self, admission: Admitted, action: Action) -> None:
        """Check that a peer would still be admitted with the current files.

        Raise Denied if it would not: its credentials are revoked or have expired, or its roles or clients have changed.
        """
        before = admission.identity
        token = None if admission.token is None else self._kept(admission.token.id)
        if admission.token is not None and token is None:
            raise Denied(f"token {admission.token.id} of {admission.token.name} is no longer known", before)
        identity = self._known(admission.certificate, token).identity
        _require(identity, action)
        if identity != before:
            raise Denied(f"the permissions of {before.name} have changed; reconnect", before, retries=True)

    def _find(self, token: SecretStr) -> Token:
        record = self._shared.find(token) or (None if self._tokens is None else self._tokens.value.find(token))
        if record is None:
            id = token_id(token)
            raise Denied("the given text is not a valid token" if id is None else f"token {id} is not known")
        return record

    def _kept(self, id: str) -> Token | None:
        return self._shared.by_id(id) or (None if self._tokens is None else self._tokens.value.by_id(id))

    def _known(self, certificate: Certificate | None, token: Token | None) -> Admitted:
        now = self._now()
        if token is not None:
            _check_token(token, now)
        if certificate is not None and not certificate.starts <= now < certificate.ends:
            reason = f"{certificate} {validity(certificate.starts, certificate.ends, now)}"
            raise Denied(reason, retries=True)  # a newer certificate may be in place already
        if token is not None and self._shared.by_id(token.id) is not None:
            return Admitted(SHARED, certificate, token)
        if certificate is None and token is None:
            raise Denied("a certificate of our CA, or a token, is required")
        identities = self._identities(frozenset() if certificate is None else certificate.names, token)
        if len(identities) != 1:
            credentials = [str(certificate)] if certificate is not None else []
            credentials += [f"token {token.id} of {token.name}"] if token is not None else []
            credential_text, owners = " and ".join(credentials), " and ".join(sorted(each.name for each in identities))
            raise Denied(
                f"{credential_text} must belong to one identity, not to {owners}"
                if owners
                else f"no identity for {credential_text}"
            )
        return Admitted(identities[0], certificate, token)

    def _identities(self, names: frozenset[str], token: Token | None) -> list[Identity]:
        if self._table is not None:
            return self._table.value.find(names, None if token is None else token.name)
        name = token.name if token is not None else min(names, default=None)
        return [] if name is None else [Identity(name, SHARED.roles, SHARED.clients, MAX_CLIENTS)]


def _require(identity: Identity, action: Action) -> None:
    if not identity.may(action):
        roles = ", ".join(sorted(identity.roles))
        raise Denied(f"{identity.name} may not {action.value}; its roles are {roles}", identity)


def _check_token(token: Token, now: datetime) -> None:
    state = token.state(now)
    if state != "valid":
        reason, moment = ("was revoked", token.revoked) if state == "revoked" else ("has expired", token.expires)
        raise Denied(f"token {token.id} of {token.name} {reason} at {moment:%Y-%m-%d %H:%M:%S} UTC", final=True)
