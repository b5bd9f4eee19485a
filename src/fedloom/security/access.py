"""Access control: looks up a peer's credentials in the tokens and identities of an aggregator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from fedloom.security.credentials import Certificate, validity
from fedloom.security.files import ReloadingFile
from fedloom.security.identities import MAX_CLIENTS, Action, Identity, Role, read_identities
from fedloom.security.tokens import Token, Tokens, keep_token, read_tokens, token_id


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
        shown = [] if self.certificate is None else [f"certificate {self.certificate.fingerprint[:16]}"]
        return " and ".join(shown + ([] if self.token is None else [f"token {self.token.id}"]))


class Denied(Exception):
    """The peer is not admitted, or lacks a permission.

    Parameters
    ----------
    reason
        Sentence that may be shown to the peer.
    identity
        Identity of the peer; None if it is unknown.
    again
        True if the peer should reconnect: its permissions have changed, or a newer certificate may be in place already.
    final
        True if its token is revoked or has expired, which no other file can change. An unknown token or certificate may
        be in a file that is about to be replaced.
    """

    def __init__(
        self, reason: str, identity: Identity | None = None, *, again: bool = False, final: bool = False
    ) -> None:
        super().__init__(reason)
        self.identity = identity
        self.again = again
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
        admitted = self._known(presented.certificate, token)
        _require(admitted.identity, action)
        return admitted

    def check(self, admitted: Admitted, action: Action) -> None:
        """Check that a peer would still be admitted with the current files.

        Raise Denied if it would not: its credentials are revoked or have expired, or its roles or clients have changed.
        """
        before = admitted.identity
        token = None if admitted.token is None else self._kept(admitted.token.id)
        if admitted.token is not None and token is None:
            raise Denied(f"token {admitted.token.id} of {admitted.token.name} is no longer known", before)
        identity = self._known(admitted.certificate, token).identity
        _require(identity, action)
        if identity != before:
            raise Denied(f"the permissions of {before.name} have changed; reconnect", before, again=True)

    def _find(self, token: SecretStr) -> Token:
        found = self._shared.find(token) or (None if self._tokens is None else self._tokens.value.find(token))
        if found is None:
            id = token_id(token)
            raise Denied("the given text is not a valid token" if id is None else f"token {id} is not known")
        return found

    def _kept(self, id: str) -> Token | None:
        return self._shared.of(id) or (None if self._tokens is None else self._tokens.value.of(id))

    def _known(self, certificate: Certificate | None, token: Token | None) -> Admitted:
        now = self._now()
        if token is not None:
            _check_token(token, now)
        if certificate is not None and not certificate.starts <= now < certificate.ends:
            reason = f"{certificate} {validity(certificate.starts, certificate.ends, now)}"
            raise Denied(reason, again=True)  # a newer certificate may be in place already
        if token is not None and self._shared.of(token.id) is not None:
            return Admitted(SHARED, certificate, token)
        if certificate is None and token is None:
            raise Denied("a certificate of our CA, or a token, is required")
        found = self._identities(frozenset() if certificate is None else certificate.names, token)
        if len(found) != 1:
            shown = [str(certificate)] if certificate is not None else []
            shown += [f"token {token.id} of {token.name}"] if token is not None else []
            what, owners = " and ".join(shown), " and ".join(sorted(each.name for each in found))
            raise Denied(f"{what} must belong to one identity, not to {owners}" if found else f"no identity for {what}")
        return Admitted(found[0], certificate, token)

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
        what, when = ("was revoked", token.revoked) if state == "revoked" else ("has expired", token.expires)
        raise Denied(f"token {token.id} of {token.name} {what} at {when:%Y-%m-%d %H:%M:%S} UTC", final=True)
