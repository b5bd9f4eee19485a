"""Signatures of the keys in a secure sum: they keep the aggregator from substituting keys of its own.

=======================  ========================================  ====================================================
scheme                   member has                                the others have, before the run
=======================  ========================================  ====================================================
`NoSigner`               nothing                                   nothing; for simulations. The aggregator can pose as
                                                                   any member, and so read the value of each
`KeySigner`              an Ed25519 key of its own                 a register of signature keys (`read_register`)
`CertificateSigner`      its certificate and key                   the authorities that they trust, and the identity
                                                                   file if clients are not named as certificates are
=======================  ========================================  ====================================================

A token is a secret between a member and the aggregator, and proves nothing to other members. Members with tokens
therefore each make a signature key, and agree on the register without the aggregator: by mail, on paper, or in a
repository that they all review. Anyone who distributes the register, or can sign certificates, can insert other keys.
If that is the operator of the aggregator, signatures protect against others who break into the aggregator, but not
against the operator.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fedloom.errors import ExperimentError, RefusedError, argument
from fedloom.security.access import Identities, Identity, read_identities
from fedloom.security.certificates import URI, KeyPair, parse_certificate, read_ca, read_key_pair
from fedloom.security.files import create, read_text
from fedloom.security.options import IN_FOLDER, ClientOptions


class Signer(Protocol):
    """Signature key of a member."""

    length: int
    """Length of every signature in bytes; the same for all members of a session."""

    def sign(self, message: bytes) -> bytes:
        """Return a signature, with everything else that a verifier needs."""


class Verifier(Protocol):
    """Verifier of the signatures of clients."""

    def verify(self, client: str, message: bytes, signature: bytes) -> None:
        """Raise RefusedError if the signature is not this client's."""


class NoSigner:
    """Placeholder for signatures in simulations, one byte each."""

    length = 1

    def sign(self, message: bytes) -> bytes:
        """Return a byte that proves nothing."""
        return bytes(self.length)


class NoVerifier:
    """Verifier that checks nothing, for simulations: members accept any keys from the aggregator."""

    def verify(self, client: str, message: bytes, signature: bytes) -> None:
        """Accept everything."""


@dataclass(frozen=True)
class Signing:
    """Signature key of the members in one process, and the verifier of the others' signatures."""

    signer: Signer
    verifier: Verifier


NO_SIGNING = Signing(NoSigner(), NoVerifier())
"""No signatures."""


class KeySigner:
    """Signs with a member's Ed25519 key."""

    length = 64

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def sign(self, message: bytes) -> bytes:
        """Return an Ed25519 signature."""
        return self._key.sign(message)


@dataclass(frozen=True)
class RegisteredKey:
    """Line of the register: a client's id, or a pattern with ``*`` and ``?``, and a signature key of its owner."""

    clients: str
    key: Ed25519PublicKey


class KeyVerifier:
    """Verifies signatures with the keys of a register."""

    def __init__(self, register: Iterable[RegisteredKey]) -> None:
        self._by_id: dict[str, list[Ed25519PublicKey]] = {}
        self._by_pattern: list[tuple[Identity, Ed25519PublicKey]] = []
        for line in register:
            if set(line.clients) & set("*?"):
                self._by_pattern.append((Identity("", frozenset(), (line.clients,)), line.key))
            else:
                self._by_id.setdefault(line.clients, []).append(line.key)

    def verify(self, client: str, message: bytes, signature: bytes) -> None:
        """Raise RefusedError if the signature was not made with a key of this client."""
        keys = [*self._by_id.get(client, ()), *(key for owner, key in self._by_pattern if owner.speaks_for(client))]
        if not keys:
            raise RefusedError(f"The register of signature keys has none for {client}.", found=client)
        for key in keys:
            with contextlib.suppress(InvalidSignature):
                key.verify(signature[: KeySigner.length], message)
                return
        raise RefusedError(f"The keys presented for {client} are not signed by it.", found=client)


def create_signing_key(path: Path) -> str:
    """Create a member's signature key in a new file (0600), and return the public key as the register writes it.

    Raise ExperimentError if the file exists already, StorageError if it cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    create(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(), private=True)
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def read_signing_key(path: Path) -> KeySigner:
    """Read a member's signature key.

    Raise ExperimentError if the file cannot be read, or has no Ed25519 key in PEM format.
    """
    try:
        key = load_pem_private_key(read_text(path, "signature key").encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ExperimentError(f"{path} has no Ed25519 key, unencrypted and in PEM format.")
    return KeySigner(key)


def read_register(path: Path) -> tuple[RegisteredKey, ...]:
    """Read a register of signature keys.

    Each line has the clients (an id, or a pattern with ``*`` and ``?``) and a public key in base64; ``#`` begins a
    comment. Several lines may be for one client: an old key and its replacement.

    Raise ExperimentError if the file cannot be read, or a line is invalid; the message names the line.
    """
    keys = []
    for number, line in enumerate(read_text(path, "register of signature keys").splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            clients, key_text = words
            key = Ed25519PublicKey.from_public_bytes(base64.b64decode(key_text, validate=True))
        except (ValueError, binascii.Error):
            clients = ""
        if not re.fullmatch(r"[A-Za-z0-9._*?-]{1,128}", clients):
            raise ExperimentError(
                f"Line {number} of {path} must be a client's id, or a pattern, and an Ed25519 public key in base64."
            )
        keys.append(RegisteredKey(clients, key))
    return tuple(keys)


class CertificateSigner:
    """Signs with the key of a member's certificate; each signature includes the certificate and its chain.

    Parameters
    ----------
    pair
        Certificate, intermediate certificates, and key: ECDSA, Ed25519 or RSA.

    Raises
    ------
    ExperimentError
        If the key is of another kind, or the certificates are too long.
    """

    length = 2048

    def __init__(self, pair: KeyPair) -> None:
        key = load_pem_private_key(pair.key, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey):
            raise ExperimentError(f"The key of {pair.certificate} cannot sign; use ECDSA, Ed25519 or RSA.")
        self._key = key
        chain = x509.load_pem_x509_certificates(pair.chain)
        self._chain = b"".join(_packed(each.public_bytes(Encoding.DER)) for each in chain)
        size = len(self._chain) + len(_packed(self._signature(b"")))
        if size + 8 > self.length:  # an ECDSA signature varies in length
            raise ExperimentError(
                f"{pair.certificate} and its intermediate certificates have {size:,} bytes with a signature; at most "
                f"{self.length - 8:,} fit. Use ECDSA keys, or leave out the authority's own certificate."
            )

    def sign(self, message: bytes) -> bytes:
        """Return the certificates and a signature, padded with zeros."""
        return (self._chain + _packed(self._signature(message))).ljust(self.length, b"\0")

    def _signature(self, message: bytes) -> bytes:
        if isinstance(self._key, ec.EllipticCurvePrivateKey):
            return self._key.sign(message, ec.ECDSA(SHA256()))
        if isinstance(self._key, ed25519.Ed25519PrivateKey):
            return self._key.sign(message)
        return self._key.sign(message, _pss(), SHA256())


class CertificateVerifier:
    """Verifies signatures with certificates that come with them.

    Parameters
    ----------
    ca
        Trusted authorities, in PEM format. Certificates must conform to RFC 5280, and be made for clients.
    identities
        The member's own identity file, which lists the clients that a certificate may sign for. Without one, a
        certificate with the name ``urn:fedloom:NAME`` signs for the client NAME.
    now
        Returns the current time in UTC.
    """

    def __init__(
        self,
        ca: bytes,
        identities: Identities | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._authorities = x509.load_pem_x509_certificates(ca)
        self._identities = identities
        self._now = now

    def verify(self, client: str, message: bytes, signature: bytes) -> None:
        """Raise RefusedError if the signature was not made with a certificate for this client that is valid now."""
        try:
            *chain, signed_part = _unpacked(signature)
            leaf, *others = map(x509.load_der_x509_certificate, chain)
            self._check_chain(leaf, others)
            _verify(leaf, message, signed_part)
        except (ValueError, InvalidSignature, UnsupportedAlgorithm, VerificationError) as error:
            raise RefusedError(
                f"The keys presented for {client} are not signed with a trusted certificate"
                f"{f' ({error})' if str(error) else ''}.",
                found=client,
            ) from None
        if not self._speaks_for(leaf, client):
            raise RefusedError(
                f"The keys presented for {client} are signed with another owner's certificate.", found=client
            )

    def _check_chain(self, leaf: x509.Certificate, others: list[x509.Certificate]) -> None:
        policy = PolicyBuilder().store(Store(self._authorities)).time(self._now())
        policy.build_client_verifier().verify(leaf, others)

    def _speaks_for(self, leaf: x509.Certificate, client: str) -> bool:
        names = parse_certificate(leaf.public_bytes(Encoding.PEM)).names
        if self._identities is None:
            return f"URI:{URI}{client}" in names
        entries = (entry for entry in self._identities.entries if entry.certificate in names)
        return any(entry.identity.speaks_for(client) for entry in entries)


def _verify(leaf: x509.Certificate, message: bytes, signature: bytes) -> None:
    """Raise InvalidSignature or UnsupportedAlgorithm if the signature was not made with the certificate's key."""
    key = leaf.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, message, ec.ECDSA(SHA256()))
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, message)
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, message, _pss(), SHA256())
    else:
        raise UnsupportedAlgorithm("its key cannot sign")


def _pss() -> padding.PSS:
    return padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


def _packed(part: bytes) -> bytes:
    return len(part).to_bytes(2, "big") + part


def _unpacked(packed: bytes) -> list[bytes]:
    """Return the parts of a signature with certificates, up to the zeros at its end.

    Raise ValueError if there are fewer than two, or the last is cut.
    """
    parts, offset = [], 0
    while length := int.from_bytes(packed[offset : offset + 2], "big"):
        parts.append(packed[offset + 2 : offset + 2 + length])
        offset += 2 + length
    if len(parts) < 2 or offset > len(packed):
        raise ValueError("it has no certificate")
    return parts


def signing_of(signatures: str | None, options: ClientOptions | None) -> Signing:
    """Return the signatures that an experiment asks for (``federation.secure_aggregation.signatures``).

    Raise ExperimentError if a required file is missing, or has invalid content.
    """
    options = options or ClientOptions()
    if signatures == "keys":
        if options.signing_key is None or options.register is None:
            raise _missing(signatures, "signing_key", "register")
        return Signing(read_signing_key(options.signing_key), KeyVerifier(read_register(options.register)))
    if signatures == "certificates":
        if options.certificate is None or options.key is None or options.ca is None:
            raise _missing(signatures, "certificate", "key", "ca")
        identities = None if options.identities is None else read_identities(options.identities)
        pair = read_key_pair(options.certificate, options.key)
        return Signing(CertificateSigner(pair), CertificateVerifier(read_ca(options.ca), identities))
    return NO_SIGNING


def _missing(signatures: str, *fields: str) -> ExperimentError:
    *others, last = (IN_FOLDER[field] for field in fields)
    return ExperimentError(
        f"federation.secure_aggregation.signatures is {signatures}, for which {argument('credentials')} must have "
        f"{', '.join(others)} and {last} (docs/security.md).",
        key="credentials",
    )
