"""Signatures of keys, and the clients that a key may sign for."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from facts import refusing

from fedloom.errors import ExperimentError, RefusedError
from fedloom.security.access import read_identities
from fedloom.security.certificates import make_ca, make_certificate, read_ca, read_key_pair
from fedloom.security.signing import (
    CertificateSigner,
    CertificateVerifier,
    KeySigner,
    KeyVerifier,
    create_signing_key,
    read_register,
    read_signing_key,
)


def test_a_registered_key_signs_only_for_its_clients(tmp_path: Path) -> None:
    north, south = (create_signing_key(tmp_path / f"{name}.key") for name in ("north", "south"))
    register = tmp_path / "register"
    register.write_text(f"# agreed by mail\nnorth-* {north}  # a hospital\n\nsouth {south}\nsouth {north}\n")
    verifier = KeyVerifier(read_register(register))
    signer = read_signing_key(tmp_path / "north.key")
    signature = signer.sign(b"keys")
    assert len(signature) == signer.length
    verifier.verify("north-1", b"keys", signature + bytes(9))  # rows may be padded
    verifier.verify("south", b"keys", signature)  # its second key
    for client, message, signed in [
        ("north-1", b"other keys", signature),
        ("north-1", b"keys", read_signing_key(tmp_path / "south.key").sign(b"keys")),
        ("north", b"keys", signature),
        ("north-1", b"keys", bytes(64)),
        ("north-1", b"keys", b""),
    ]:
        with refusing(RefusedError, client):
            verifier.verify(client, message, signed)
    assert (tmp_path / "north.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ExperimentError):
        create_signing_key(tmp_path / "north.key")


@pytest.mark.parametrize("line", ["north", "north x y", "north x", "no/rth {key}", "north {key}="])
def test_invalid_lines_of_a_register(line: str, tmp_path: Path) -> None:
    key = create_signing_key(tmp_path / "key")
    (tmp_path / "register").write_text(f"north {key}\n{line.format(key=key)}\n")
    with refusing(ExperimentError, "2"):
        read_register(tmp_path / "register")


def test_files_without_a_signature_key(tmp_path: Path) -> None:
    make_ca(tmp_path)
    (tmp_path / "text").write_text("text")
    for name in ("ca.key", "text", "missing"):
        with refusing(ExperimentError, name):
            read_signing_key(tmp_path / name)


def test_a_certificate_signs_for_the_client_that_it_names(tmp_path: Path) -> None:
    make_ca(tmp_path)
    for name, hosts in [("north", []), ("aggregator", ["localhost"])]:
        make_certificate(name, tmp_path, tmp_path, hosts=hosts)
    other = tmp_path / "other"
    other.mkdir()
    make_ca(other)
    make_certificate("north", other, other)

    def signer(folder: Path) -> CertificateSigner:
        return CertificateSigner(read_key_pair(folder / "tls.crt", folder / "tls.key"))

    verifier = CertificateVerifier(read_ca(tmp_path / "ca.crt"))
    signature = signer(tmp_path / "north").sign(b"keys")
    assert len(signature) == CertificateSigner.length
    verifier.verify("north", b"keys", signature)
    for client, message, signed in [
        ("north", b"other keys", signature),
        ("north-1", b"keys", signature),
        ("south", b"keys", signature),
        ("north", b"keys", signer(tmp_path / "aggregator").sign(b"keys")),
        ("north", b"keys", signer(other / "north").sign(b"keys")),
        ("north", b"keys", signature[:300]),
        ("north", b"keys", bytes(2048)),
        ("north", b"keys", b"\0\5abcde\0\1x\0\0"),
        ("north", b"keys", b""),
    ]:
        with refusing(RefusedError, client):
            verifier.verify(client, message, signed)

    identities = tmp_path / "identities.yaml"
    identities.write_text(
        "version: 1\nidentities:\n"
        '  - {name: north, certificate: "URI:urn:fedloom:north", token: north, roles: [worker], clients: ["north-*"]}\n'
    )
    verifier = CertificateVerifier(read_ca(tmp_path / "ca.crt"), read_identities(identities))
    verifier.verify("north-1", b"keys", signature)
    with refusing(RefusedError, "south-1"):
        verifier.verify("south-1", b"keys", signature)


def test_a_certificate_that_has_expired_does_not_sign(tmp_path: Path) -> None:
    make_ca(tmp_path)
    made = make_certificate("north", tmp_path, tmp_path)
    pair = read_key_pair(made.certificate, made.key)
    signature, ca = CertificateSigner(pair).sign(b"keys"), read_ca(tmp_path / "ca.crt")
    CertificateVerifier(ca, now=lambda: made.ends - timedelta(minutes=1)).verify("north", b"keys", signature)
    with refusing(RefusedError, "north"):
        CertificateVerifier(ca, now=lambda: made.ends + timedelta(minutes=1)).verify("north", b"keys", signature)
    with refusing(ExperimentError, "north"):
        CertificateSigner(dataclasses.replace(pair, chain=pair.chain * 5))  # too long


def test_an_empty_register_verifies_nobody() -> None:
    with refusing(RefusedError, "north"):
        KeyVerifier([]).verify("north", b"keys", KeySigner(Ed25519PrivateKey.generate()).sign(b"keys"))
