"""Certificates and keys in PEM files: read, checked, and described in words."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.errors import ExperimentError, RefusedError, argument
from fedloom.trust.files import read_text

if TYPE_CHECKING:
    from cryptography import x509


@dataclass(frozen=True)
class Certificate:
    """What a certificate says.

    Attributes
    ----------
    names
        Its subject alternative names, ``URI:...``, ``DNS:...`` and ``IP:...``.
    fingerprint
        SHA-256 of it, hexadecimal.
    starts, ends
        When it is valid.
    """

    names: frozenset[str]
    fingerprint: str
    starts: datetime
    ends: datetime

    def __str__(self) -> str:
        """Return what it is called in messages."""
        return f"the certificate of {', '.join(sorted(self.names)) or 'nobody (it has no name)'}"


@dataclass(frozen=True)
class KeyPair:
    """A certificate with those that vouch for it, and its key, as PEM files have them."""

    chain: bytes
    key: bytes
    certificate: Certificate

    def __repr__(self) -> str:
        """Return no key."""
        return f"KeyPair({self.certificate})"


def parse_certificate(pem: bytes) -> Certificate:
    """Read the first certificate of a PEM text.

    Raises
    ------
    ValueError
        If there is none.
    """
    from cryptography import x509

    return _said(x509.load_pem_x509_certificate(pem))


TLS_FILES = (argument("tls_certificate"), argument("tls_key"))
"""What errors call the files of a key pair that the user has named."""


def read_key_pair(certificate: Path, key: Path, *, names: tuple[str, str] = TLS_FILES) -> KeyPair:
    """Read a certificate and its key.

    Parameters
    ----------
    names
        What errors call the two.

    Raises
    ------
    ExperimentError
        If a file cannot be read or holds something else, or the key is another certificate's.
    RefusedError
        If the certificate has ended, or is not valid yet: nobody would let us in with it.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    chain = read_text(certificate, names[0]).encode()
    secret = read_text(key, names[1]).encode()
    try:
        first = x509.load_pem_x509_certificates(chain)[0]
        said = _said(first)
    except ValueError:
        raise ExperimentError(f"{names[0]} {certificate}: found no certificate; allowed: PEM") from None
    try:
        private = load_pem_private_key(secret, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        locked = " that is encrypted" if isinstance(error, TypeError) else ""
        found = "a key" if locked else "no key"
        raise ExperimentError(f"{names[1]} {key}: found {found}{locked}; allowed: PEM, not encrypted") from None
    if private.public_key() != first.public_key():
        raise ExperimentError(f"{names[1]} {key}: found a key that is not of {certificate}; allowed: its own")
    now = datetime.now(UTC)
    if not said.starts <= now < said.ends:
        raise RefusedError(
            f"{certificate}: {said} {validity(said.starts, said.ends, now)}",
            hint="correct this machine's clock, or have the certificate made again",
        )
    return KeyPair(chain, secret, said)


def read_ca(path: Path, *, what: str = argument("tls_ca")) -> bytes:
    """Read the certificates of the authorities that are trusted.

    Raises
    ------
    ExperimentError
        If the file cannot be read, or holds no certificate, or none that may vouch for others.
    """
    from cryptography import x509

    content = read_text(path, what).encode()
    try:
        found = x509.load_pem_x509_certificates(content)
        authorities = [_is_authority(each) for each in found]
    except ValueError:
        raise ExperimentError(f"{what} {path}: found no certificate; allowed: PEM") from None
    if not any(authorities):
        name = found[0].subject.rfc4514_string()
        raise ExperimentError(f"{what} {path}: found {name}, which is no authority; allowed: certificates of a CA")
    return content


def validity(starts: datetime, ends: datetime, now: datetime) -> str:
    """Say since when, or until when, a certificate is not valid, and what this clock says: one of them is wrong."""
    said = f"ended at {_utc(ends)}" if now >= ends else f"is valid from {_utc(starts)} only"
    return f"{said}, and this machine's clock says {_utc(now)}"


def _utc(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def _said(found: x509.Certificate) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    said = [f"URI:{name}" for name in names.get_values_for_type(x509.UniformResourceIdentifier)]
    said += [f"DNS:{name}" for name in names.get_values_for_type(x509.DNSName)]
    said += [f"IP:{name}" for name in names.get_values_for_type(x509.IPAddress)]
    starts, ends = found.not_valid_before_utc, found.not_valid_after_utc
    return Certificate(frozenset(said), found.fingerprint(SHA256()).hex(), starts, ends)


def _is_authority(found: x509.Certificate) -> bool:
    from cryptography import x509

    try:
        return found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False
