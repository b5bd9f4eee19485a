"""Who is let in: what a peer has presented, looked up in the tokens and the identities of an aggregator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from fedloom.trust.credentials import Certificate, validity
from fedloom.trust.files import Reread
from fedloom.trust.identities import MAX_CLIENTS, Action, Identity, Role, read_identities
from fedloom.trust.tokens import Token, Tokens, keep_token, read_tokens, token_id


@dataclass(frozen=True)
class Presented:
    """What a peer has shown of itself: a certificate, a token, both or neither."""

    certificate: Certificate | None = None
    token: SecretStr | None = None


@dataclass(frozen=True)
class Admitted:
    """A peer that was let in, and by what."""

    identity: Identity
    certificate: Certificate | None
    token: Token | None

    @property
    def ends(self) -> datetime | None:
        """When what it was let in by ends; None is never."""
        ends = [
            None if self.certificate is None else self.certificate.ends,
            None if self.token is None else self.token.expires,
        ]
        return min((end for end in ends if end is not None), default=None)

    @property
    def credential(self) -> str:
        """What it was let in by, for the audit log."""
        shown = [] if self.certificate is None else [f"certificate {self.certificate.fingerprint[:16]}"]
        return " and ".join(shown + ([] if self.token is None else [f"token {self.token.id}"]))


class Denied(Exception):
    """A peer is not let in, or not for this.

    Parameters
    ----------
    reason
        A sentence that may be told to the peer.
    identity
        Who it is, as far as that is known: None is nobody that we know.
    again
        Whether it would be let in if it came again: it is the same, and may do something else than before.
    final
        Whether its token has been revoked or has expired, which no other file can change. A token or a certificate that
        is not known may be in a file that is about to be replaced.
    """

    def __init__(
        self, reason: str, identity: Identity | None = None, *, again: bool = False, final: bool = False
    ) -> None:
        super().__init__(reason)
        self.identity = identity
        self.again = again
        self.final = final


SHARED = Identity("shared-token", frozenset({Role.WORKER, Role.PERSONALIZE, Role.WATCH}), ("*",))
"""Who has the token that is in no file: it speaks for every client. Whoever is known is as much, without a table."""


class Access:
    """Says who a peer is, by files that are read again when they change.

    Any thread may ask. What is refused is refused before anything else of a message is looked at.

    Parameters
    ----------
    tokens
        File of tokens; None: no token is known.
    identities
        Table of identities; None: whoever presents a certificate of our CA, or a token that is known, may be a worker
        for every client, ask for every client's model, and watch.
    shared
        A token that is in no file, which our own workers have, and who watches them or asks for models; the table does
        not speak of it.
    now
        The time, in UTC.

    Raises
    ------
    ExperimentError
        If a file cannot be read, or says what is not allowed.
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
        self._tokens = Reread([tokens], lambda: read_tokens(tokens)) if tokens is not None else None
        self._table = Reread([identities], lambda: read_identities(identities)) if identities is not None else None
        self._shared = Tokens(() if shared is None else (keep_token(SHARED.name, shared),))

    @property
    def stale(self) -> bool:
        """Whether a file has changed since it was last looked at, which costs no more than to look."""
        return any(file.stale for file in self._files)

    def refresh(self) -> dict[Path, int]:
        """Read files again that have changed; return how often each has said something else so far."""
        for file in self._files:
            file.refresh()
        return self.versions

    @property
    def versions(self) -> dict[Path, int]:
        """How often each file has said something else so far, as far as they have been read."""
        return {path: file.version for file in self._files for path in file.paths}

    @property
    def _files(self) -> list[Reread[Any]]:
        return [file for file in (self._tokens, self._table) if file is not None]

    def admit(self, presented: Presented, action: Action) -> Admitted:
        """Return who a peer is, if it may do this.

        Raises
        ------
        Denied
            If it is nobody we know, what it presents is not valid (any more), or none of its roles allows this.
        """
        token = None if presented.token is None else self._find(presented.token)
        admitted = self._known(presented.certificate, token)
        _require(admitted.identity, action)
        return admitted

    def check(self, admitted: Admitted, action: Action) -> None:
        """Make sure that a peer would be let in again, as the files are now.

        Raises
        ------
        Denied
            If not: revoked, expired, or with other roles or clients than before.
        """
        before = admitted.identity
        token = None if admitted.token is None else self._kept(admitted.token.id)
        if admitted.token is not None and token is None:
            raise Denied(f"token {admitted.token.id} of {admitted.token.name} is not known any more", before)
        identity = self._known(admitted.certificate, token).identity
        _require(identity, action)
        if identity != before:
            raise Denied(f"what {before.name} may do has changed: it has to come again", before, again=True)

    def _find(self, token: SecretStr) -> Token:
        found = self._shared.find(token) or (None if self._tokens is None else self._tokens.value.find(token))
        if found is None:
            id = token_id(token)
            raise Denied("what was presented as a token is none" if id is None else f"token {id} is not known")
        return found

    def _kept(self, id: str) -> Token | None:
        return self._shared.of(id) or (None if self._tokens is None else self._tokens.value.of(id))

    def _known(self, certificate: Certificate | None, token: Token | None) -> Admitted:
        now = self._now()
        if token is not None and (state := token.state(now)) != "valid":
            when = token.revoked if state == "revoked" else token.expires
            raise Denied(f"token {token.id} of {token.name} {_was(state)} {when:%Y-%m-%d %H:%M:%S} UTC", final=True)
        if certificate is not None and not certificate.starts <= now < certificate.ends:
            reason = f"{certificate} {validity(certificate.starts, certificate.ends, now)}"
            raise Denied(reason, again=True)  # a newer one may be there already
        if token is not None and self._shared.of(token.id) is not None:
            return Admitted(SHARED, certificate, token)
        shown = [str(certificate)] if certificate is not None else []
        shown += [f"token {token.id} of {token.name}"] if token is not None else []
        if not shown:
            raise Denied("found neither a certificate nor a token; allowed: a certificate of our CA, or a token")
        found = self._identities(frozenset() if certificate is None else certificate.names, token)
        if len(found) != 1:
            whose = " and ".join(sorted(each.name for each in found))
            raise Denied(
                f"{' and '.join(shown)}: " + (f"found {whose}; allowed: one identity" if found else "nobody's")
            )
        return Admitted(found[0], certificate, token)

    def _identities(self, names: frozenset[str], token: Token | None) -> list[Identity]:
        if self._table is not None:
            return self._table.value.find(names, None if token is None else token.name)
        name = token.name if token is not None else min(names, default=None)
        return [] if name is None else [Identity(name, SHARED.roles, SHARED.clients, MAX_CLIENTS)]


def _require(identity: Identity, action: Action) -> None:
    if not identity.may(action):
        roles = ", ".join(sorted(identity.roles))
        raise Denied(f"{identity.name} may not {action.value}: found the roles {roles}", identity)


def _was(state: str) -> str:
    return "was revoked at" if state == "revoked" else "has expired at"
