"""Certificates and keys in PEM files: reading, checks, and descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedloom.errors import ExperimentError, RefusedError
from fedloom.security.files import read_text


@dataclass(frozen=True)
class Certificate:
    """Content of a certificate."""

    names: frozenset[str]
    """Subject alternative names, ``URI:...``, ``DNS:...`` and ``IP:...``."""
    fingerprint: str
    """SHA-256 of the certificate, in hexadecimal."""
    starts: datetime
    """Start of the period of validity."""
    ends: datetime

    def __str__(self) -> str:
        return f"the certificate of {', '.join(sorted(self.names)) or 'an unnamed subject'}"


@dataclass(frozen=True)
class KeyPair:
    """Certificate with its chain, and its key, as in the PEM files."""

    chain: bytes
    key: bytes
    certificate: Certificate

    def __repr__(self) -> str:
        return f"KeyPair({self.certificate})"


def parse_certificate(pem: bytes) -> Certificate:
    """Parse the first certificate of a PEM text.

    Raise ValueError if there is none.
    """
    return _content(x509.load_pem_x509_certificate(pem))


TLS_FILES = ("tls.crt", "tls.key")
"""Names, in errors, of the files of a key pair that the user has given."""


def read_key_pair(certificate: Path, key: Path, *, names: tuple[str, str] = TLS_FILES) -> KeyPair:
    """Read a certificate and its key.

    Parameters
    ----------
    names
        Names of the two files in errors.

    Raises
    ------
    ExperimentError
        If a file cannot be read, has other content, or the key does not match the certificate.
    RefusedError
        If the certificate has expired or is not valid yet: no peer would admit us with it.
    """
    chain = read_text(certificate, names[0]).encode()
    secret = read_text(key, names[1]).encode()
    try:
        first = x509.load_pem_x509_certificates(chain)[0]
        content = _content(first)
    except ValueError:
        raise ExperimentError(f"{names[0]} {certificate} has no certificate in PEM format.") from None
    try:
        private = load_pem_private_key(secret, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        wrong = "is encrypted; give one that is not" if isinstance(error, TypeError) else "has no key in PEM format"
        raise ExperimentError(f"{names[1]} {key} {wrong}.") from None
    if private.public_key() != first.public_key():
        raise ExperimentError(f"{names[1]} {key} is not the key of {certificate}.")
    check_valid(certificate, content)
    return KeyPair(chain, secret, content)


def read_ca(path: Path) -> bytes:
    """Read the certificates of the trusted authorities.

    Raise ExperimentError if the file cannot be read, or has no certificate of an authority.
    """
    content = read_text(path, "ca.crt").encode()
    try:
        found = x509.load_pem_x509_certificates(content)
        authorities = [_is_authority(each) for each in found]
    except ValueError:
        raise ExperimentError(f"ca.crt {path} has no certificate in PEM format.") from None
    if not any(authorities):
        name = found[0].subject.rfc4514_string()
        raise ExperimentError(f"ca.crt {path} has the certificate of {name}, which is not an authority.")
    return content


def check_valid(path: Path | None, certificate: Certificate) -> None:
    """Raise RefusedError if our certificate is not valid now, because no peer would admit us with it."""
    now = datetime.now(UTC)
    if not certificate.starts <= now < certificate.ends:
        raise RefusedError(
            f"{path}: {certificate} {validity(certificate.starts, certificate.ends, now)}",
            hint="correct this machine's clock, or renew the certificate",
        )


def validity(starts: datetime, ends: datetime, now: datetime) -> str:
    """Return why a certificate is not valid now, with this machine's time: either may be wrong."""
    problem = f"expired at {_utc(ends)}" if now >= ends else f"is not valid before {_utc(starts)}"
    return f"{problem}, and this machine's clock shows {_utc(now)}"


def _utc(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def _content(found: x509.Certificate) -> Certificate:
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    listed = [f"URI:{name}" for name in names.get_values_for_type(x509.UniformResourceIdentifier)]
    listed += [f"DNS:{name}" for name in names.get_values_for_type(x509.DNSName)]
    listed += [f"IP:{name}" for name in names.get_values_for_type(x509.IPAddress)]
    starts, ends = found.not_valid_before_utc, found.not_valid_after_utc
    return Certificate(frozenset(listed), found.fingerprint(SHA256()).hex(), starts, ends)


def _is_authority(found: x509.Certificate) -> bool:
    try:
        return found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False
