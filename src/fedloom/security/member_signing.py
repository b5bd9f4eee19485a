"""Signatures of a member, from its folder of credentials."""

from __future__ import annotations

from fedloom.errors import ExperimentError, argument
from fedloom.security.credentials import read_ca, read_key_pair
from fedloom.security.identities import read_identities
from fedloom.security.options import IN_FOLDER, ClientOptions
from fedloom.security.signing import (
    NO_SIGNING,
    CertificateSigner,
    CertificateVerifier,
    KeyVerifier,
    Signing,
    read_register,
    read_signing_key,
)


def signing_of(signatures: str | None, options: ClientOptions | None) -> Signing:
    """Return the signatures that an experiment asks for (``federation.secure_aggregation.signatures``).

    Raises
    ------
    ExperimentError
        If a file that they need is missing, or has other content.
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
