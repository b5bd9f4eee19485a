"""Certificates and keys: reading and checking PEM files, and an authority for trials.

A production installation uses its existing authority.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.errors import ExperimentError, RefusedError, argument
from fedloom.experiment.validation_errors import abbreviated
from fedloom.security.files import create, read_text, write_private
from fedloom.security.tokens import check_member_name

CA_DAYS = 365
LEAF_DAYS = 30
MOST_DAYS = 3650
EARLIER = timedelta(minutes=5)
"""Time by which the start of validity precedes creation, for slow clocks."""

URI = "urn:fedloom:"
"""Prefix of a member's name in its certificate."""


TLS_FILES = ("tls.crt", "tls.key")
"""Names, in errors, of the files of a key pair that the user has given."""


@dataclass(frozen=True)
class CertificateFiles:
    """Created files, the expiry of the certificate, and the names in it."""

    certificate: Path
    key: Path
    ends: datetime
    names: tuple[str, ...]


def make_ca(folder: Path, *, days: int = CA_DAYS) -> CertificateFiles:
    """Create an authority: ``ca.crt`` to distribute, and ``ca.key`` (0600), which never leaves the folder.

    Raise ExperimentError if there is one already: a new one would invalidate the certificates that it has signed. Raise
    StorageError if the files cannot be written.
    """
    key, now = ec.generate_private_key(ec.SECP256R1()), _now()
    name = _subject(f"FedLoom trial CA {now:%Y-%m-%d %H:%M}")
    builder = (
        _builder(name, name, key, now, now + timedelta(days=_allowed(days)))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
    )
    return _write(_sign(builder, key), key, folder / "ca.crt", folder / "ca.key", (), replace=False)


def make_certificate(
    name: str, folder: Path, ca: Path, *, hosts: Sequence[str] = (), days: int = LEAF_DAYS, replace: bool = False
) -> CertificateFiles:
    """Create the credentials of a member, or of a server if hosts are given, in the folder ``NAME``.

    The folder has the files that ``credentials`` expects: ``tls.crt``, ``tls.key`` (0600), the authority's ``ca.crt``.

    Parameters
    ----------
    name
        Name of the member; its certificate has the URI ``urn:fedloom:NAME``.
    folder
        Parent of the folder ``NAME``.
    ca
        Folder of the authority.
    hosts
        DNS names and IP addresses of the server.
    days
        Validity in days; never longer than the authority's.
    replace
        Replace existing files.

    Raises
    ------
    ExperimentError
        If a name is not allowed, there is no authority, or the files exist already.
    RefusedError
        If the authority has expired.
    StorageError
        If the files cannot be written.
    """
    check_member_name(name, reserved_name="ca")
    names = [x509.UniformResourceIdentifier(f"{URI}{name}"), *map(_host, hosts)]
    pair = read_key_pair(ca / "ca.crt", ca / "ca.key", names=(argument("ca"), argument("ca")))
    authority = x509.load_pem_x509_certificate(pair.chain)
    signer = load_pem_private_key(pair.key, password=None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ExperimentError(
            f"{argument('ca')} must be an authority created by `fedloom certificates ca` (got {ca}).", key="ca"
        )
    key, now = ec.generate_private_key(ec.SECP256R1()), _now()
    ends = min(now + timedelta(days=_allowed(days)), pair.certificate.ends)
    if ends <= now:
        raise RefusedError(f"{ca / 'ca.crt'}: {validity(pair.certificate.starts, pair.certificate.ends, now)}")
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])
    builder = (
        _builder(_subject(name), authority.subject, key, now, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    alternative_names = (f"URI:{URI}{name}", *hosts)
    own = folder / name
    files = _write(_sign(builder, signer), key, own / "tls.crt", own / "tls.key", alternative_names, replace=replace)
    trusted = own / "ca.crt"
    trusted_bytes = trusted.read_bytes() if trusted.exists() else b""
    if pair.chain not in trusted_bytes:  # an authority that is trusted already stays trusted until it is removed
        write_private(trusted, (trusted_bytes + pair.chain).decode())
    return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _sign(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    return builder.sign(key, SHA256())


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?", host):
            return x509.DNSName(host)
    raise ExperimentError(
        f"{argument('host')} must be a DNS name or an IP address, without a port (got {abbreviated(host)}).", key="host"
    )


def _allowed(days: int) -> int:
    if not 1 <= days <= MOST_DAYS:
        raise ExperimentError(f"{argument('days')} must be 1 to {MOST_DAYS} (got {days}).", key="days", found=days)
    return days


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _write(
    certificate: x509.Certificate,
    key: EllipticCurvePrivateKey,
    path: Path,
    key_at: Path,
    names: tuple[str, ...],
    *,
    replace: bool,
) -> CertificateFiles:
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    public = certificate.public_bytes(Encoding.PEM).decode()
    if replace and path.exists():
        # A reader between the two writes finds a key that does not match the certificate, and keeps what it has.
        write_private(key_at, secret)
        write_private(path, public)
    else:
        create(key_at, secret, private=True)
        create(path, public)
    return CertificateFiles(path, key_at, certificate.not_valid_after_utc, names)


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
        certificates = x509.load_pem_x509_certificates(content)
        authorities = [_is_authority(each) for each in certificates]
    except ValueError:
        raise ExperimentError(f"ca.crt {path} has no certificate in PEM format.") from None
    if not any(authorities):
        name = certificates[0].subject.rfc4514_string()
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


def _utc(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _content(certificate: x509.Certificate) -> Certificate:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    names_listed = [f"URI:{name}" for name in names.get_values_for_type(x509.UniformResourceIdentifier)]
    names_listed += [f"DNS:{name}" for name in names.get_values_for_type(x509.DNSName)]
    names_listed += [f"IP:{name}" for name in names.get_values_for_type(x509.IPAddress)]
    starts, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return Certificate(frozenset(names_listed), certificate.fingerprint(SHA256()).hex(), starts, ends)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False
