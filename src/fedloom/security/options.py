"""Security options of clients and servers; their files are checked, and reloaded when they change."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from pydantic import SecretStr

from fedloom.core.address import is_loopback
from fedloom.core.home import expanded
from fedloom.errors import ExperimentError, argument, spelled
from fedloom.security.access import Access
from fedloom.security.certificates import KeyPair, check_valid, read_ca, read_key_pair
from fedloom.security.files import ReloadingFile
from fedloom.security.tokens import checked_token, read_secret

log = logging.getLogger("fedloom.security")

TOKEN = "FEDLOOM_TOKEN"
"""Environment variable for a token; there is no option, because every user can see the arguments of processes."""

FILES = {
    "ca": "FEDLOOM_TLS_CA",
    "certificate": "FEDLOOM_TLS_CERTIFICATE",
    "key": "FEDLOOM_TLS_KEY",
    "token_file": "FEDLOOM_TOKEN_FILE",
    "tokens": "FEDLOOM_TOKENS",
    "identities": "FEDLOOM_IDENTITIES",
    "signing_key": "FEDLOOM_SIGNING_KEY",
    "register": "FEDLOOM_SIGNING_KEYS",
}
"""Environment variables for single files, by field of :class:`ClientOptions` and :class:`ServerOptions`."""

IN_FOLDER = {
    "ca": "ca.crt",
    "certificate": "tls.crt",
    "key": "tls.key",
    "token_file": "token",
    "tokens": "tokens.json",
    "identities": "identities.yaml",
    "signing_key": "signing.key",
    "register": "signing-keys.txt",
}
"""Names of the same files in a folder of credentials, which is laid out like a Kubernetes TLS Secret."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Files that a client and a server have in common."""

    ca: Path | None = None
    """Certificates of the trusted authorities: they verify the server, and one must have signed a peer's certificate.
    A client that has them uses only TLS."""
    certificate: Path | None = None
    key: Path | None = None
    """Key of the certificate."""
    identities: Path | None = None
    """Identity file; for a member of secure sums, with the clients that each certificate may sign for."""
    token: SecretStr | None = None
    """Our token; for a server, one shared token for workers and watchers."""
    insecure: bool = False
    """True for a client to send a token in plaintext to any host; for a server, to serve other machines even without
    TLS or without identifying peers."""

    @classmethod
    def from_folder(
        cls, folder: Path | None = None, *, insecure: bool = False, environment: Mapping[str, str] = os.environ
    ) -> Self:
        """Return the options given by a folder of credentials and by the environment (:data:`FILES`, :data:`TOKEN`).

        Environment variables name the files that the folder lacks; a token in the folder takes precedence over any in
        the environment.

        Raise ExperimentError if the folder has none of the files, RefusedError if the token is invalid.
        """
        names = [each.name for each in fields(cls) if each.name in FILES]
        in_folder: dict[str, Path] = {}
        if folder is not None:
            in_folder = {name: folder / IN_FOLDER[name] for name in names if (folder / IN_FOLDER[name]).exists()}
            if not in_folder:
                listing = ", ".join(IN_FOLDER[name] for name in names)
                problem = f"has none of {listing}" if folder.is_dir() else "is not a folder"
                raise ExperimentError(
                    f"{argument('credentials')} is {folder}, which {problem}; create them with `fedloom certificates "
                    "new` and `fedloom token new`.",
                    key="credentials",
                    found=folder,
                )
        paths = {
            name: expanded(environment[FILES[name]], FILES[name]) for name in names if environment.get(FILES[name])
        }
        token = None
        if "token_file" not in in_folder and environment.get(TOKEN):
            token = checked_token(environment[TOKEN], TOKEN)
        return cls(**{**paths, **in_folder}, token=token, insecure=insecure)


@dataclass(frozen=True, kw_only=True)
class ClientOptions(_Options):
    """Options for connecting to an aggregator."""

    token_file: Path | None = None
    """File with our token, instead of a certificate or in addition to it."""
    signing_key: Path | None = None
    """Our signature key, for secure sums (:mod:`fedloom.security.signing`)."""
    register: Path | None = None
    """Register of all members' signature keys."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions(_Options):
    """Security options of an aggregator."""

    tokens: Path | None = None
    """Token file."""


@dataclass(frozen=True)
class ClientCredentials:
    """Our credentials, and the trusted authorities, as currently in the files."""

    ca: bytes | None
    pair: KeyPair | None
    token: SecretStr | None


class Credentials:
    """Credentials for connecting to an aggregator, reloaded when their files change. Any thread may use it.

    Raise ExperimentError if a file cannot be read, or options contradict each other. Raise RefusedError if a
    certificate is not valid now, or a token is invalid.
    """

    def __init__(self, options: ClientOptions | None = None) -> None:
        options = options or ClientOptions()
        _together(options.certificate, options.key)
        if options.certificate is not None and options.ca is None:
            raise ExperimentError(
                "tls.crt needs ca.crt, the authorities to trust.",
                key="tls.crt",
            )
        if options.token is not None and options.token_file is not None:
            raise ExperimentError(f"A token file ({FILES['token_file']}) cannot be combined with {TOKEN}.", key="token")
        self._options = options
        paths = [
            path for path in (options.ca, options.certificate, options.key, options.token_file) if path is not None
        ]
        self._files = ReloadingFile(paths, self._read)

    def _read(self) -> ClientCredentials:
        options = self._options
        pair = token = None
        if options.certificate is not None and options.key is not None:
            pair = read_key_pair(options.certificate, options.key)
        if options.token_file is not None:
            token = read_secret(options.token_file)
        return ClientCredentials(None if options.ca is None else read_ca(options.ca), pair, token or options.token)

    @property
    def current(self) -> ClientCredentials:
        """Current credentials, reloaded if the files have changed."""
        self._files.refresh()
        return self._files.value

    def show(self, host: str) -> ClientCredentials:
        """Return the credentials to present to an aggregator on a host.

        Raise ExperimentError if a token could be read by others in transit. Raise RefusedError if our certificate is
        not valid now: no peer would admit us with it.
        """
        current, options = self.current, self._options
        if current.token is not None and current.ca is None and not options.insecure and not is_loopback(host):
            raise ExperimentError(
                f"A token would be sent to {host} in plaintext; use TLS (ca.crt in {argument('credentials')}), or "
                f"{argument('insecure')} to send it anyway."
            )
        if current.pair is not None:
            check_valid(options.certificate, current.pair.certificate)
        return current


@dataclass(frozen=True)
class ServerFiles:
    """Certificate of a server, and the authorities of its peers."""

    pair: KeyPair
    ca: bytes | None


class Protection:
    """Protection of an aggregator: TLS and access control.

    Raise ExperimentError if a file cannot be read, or options contradict each other. Raise RefusedError if the
    certificate is not valid now.
    """

    def __init__(self, options: ServerOptions | None = None) -> None:
        options = options or ServerOptions()
        ca, is_complete = options.ca, any((options.ca, options.tokens, options.token))
        _together(options.certificate, options.key)
        if ca is not None and options.certificate is None:
            raise ExperimentError("ca.crt needs tls.crt.", key="ca.crt")
        if options.identities is not None and not is_complete:
            raise ExperimentError("identities.yaml needs ca.crt, tokens.json, or both.", key="identities.yaml")
        self._insecure = options.insecure
        self.tls = _tls_files(options)
        """Certificate and CA; None for plaintext."""
        self.access = Access(options.tokens, options.identities, shared=options.token) if is_complete else None
        """Access rules; None if peers need no identity."""

    def check(self, host: str) -> None:
        """Refuse to listen where other machines could reach an unprotected aggregator; only warn if ``insecure``.

        Raise ExperimentError if TLS or access control is missing; the message names it.
        """
        if is_loopback(host) or (self.tls is not None and self.access is not None):
            return
        missing = ["TLS (tls.crt, tls.key)"] if self.tls is None else []
        missing += ["authentication of peers (ca.crt, tokens.json)"] if self.access is None else []
        if not self._insecure:
            raise ExperimentError(
                f"{argument('listen')} is {host}, which other machines can reach, without {' and '.join(missing)}; "
                f"listen on 127.0.0.1, give the missing files, or accept the risk with {argument('insecure')}.",
                key="listen",
                found=host,
                hint=f"{argument('credentials')} is a folder with these files; `fedloom certificates` creates one for "
                "trials (docs/security.md)",
            )
        log.warning("%s", spelled(f"other machines can reach this aggregator without {' and '.join(missing)}"))

    def check_plaintext(self, host: str, key: str) -> None:
        """Check that peers of a plaintext HTTP port can present tokens, and that it serves only this machine.

        Raise ExperimentError if there are no tokens, or if other machines can reach the port and ``insecure`` is not
        set; ``key`` names the address.
        """
        if self.access is not None and not self.access.takes_tokens:
            raise ExperimentError(
                f"{argument(key)} needs tokens, which identify its peers; add tokens.json (`fedloom token new`).",
                key=key,
            )
        if not is_loopback(host) and not self._insecure:
            raise ExperimentError(
                f"{argument(key)} is {host}, which other machines can reach, and serves plaintext; listen on 127.0.0.1 "
                f"behind a proxy with TLS, or accept the risk with {argument('insecure')}.",
                key=key,
                found=host,
            )


def _tls_files(options: ServerOptions) -> ReloadingFile[ServerFiles] | None:
    certificate, key, ca = options.certificate, options.key, options.ca
    if certificate is None or key is None:
        return None

    def read() -> ServerFiles:
        return ServerFiles(read_key_pair(certificate, key), None if ca is None else read_ca(ca))

    return ReloadingFile([path for path in (certificate, key, ca) if path is not None], read)


def _together(certificate: Path | None, key: Path | None) -> None:
    if (certificate is None) is not (key is None):
        missing = "tls.key" if certificate is None else "tls.crt"
        raise ExperimentError("tls.crt and tls.key must be given together.", key=missing)
