"""Certificates for trials, unusable certificates and keys, and signatures of members' keys."""

from __future__ import annotations

import dataclasses
import ipaddress
import ssl
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from facts import refusing, telling, tells

from fedloom.errors import ExitCode, ExperimentError, FedloomError, RefusedError
from fedloom.security import certificates
from fedloom.security.access import read_identities
from fedloom.security.certificates import EARLIER, make_ca, make_certificate, read_ca, read_key_pair
from fedloom.security.options import ClientOptions, Credentials, Protection, ServerOptions
from fedloom.security.signing import (
    CertificateSigner,
    CertificateVerifier,
    KeyVerifier,
    create_signing_key,
    read_register,
    read_signing_key,
)
from fedloom.security.tokens import make_token

Fedloom = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    make_ca(tmp_path / "ca")
    return tmp_path / "ca"


def handshake(ca: Path, server: Path, host: str, client: Path | None = None) -> str:
    """Perform a TLS handshake in memory by Python's TLS, which shares no code with gRPC's; return the error, if any."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server / "tls.crt", server / "tls.key")
    serving.load_verify_locations(ca / "ca.crt")
    serving.verify_mode = ssl.CERT_REQUIRED
    dialling = ssl.create_default_context(cafile=str(ca / "ca.crt"))
    if client is not None:
        dialling.load_cert_chain(client / "tls.crt", client / "tls.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [serving.wrap_bio(up, down, server_side=True), dialling.wrap_bio(down, up, server_hostname=host)]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return error.reason or "failed"
    return "" if all(end.cipher() for end in ends) else "not done"


def test_a_server_and_a_member_shake_hands(ca: Path, tmp_path: Path) -> None:
    make_certificate("server", tmp_path, ca, hosts=["localhost", "127.0.0.1", "::1"])
    make_certificate("north", tmp_path, ca)
    server, north = tmp_path / "server", tmp_path / "north"
    for host in ("localhost", "127.0.0.1", "::1"):
        assert handshake(ca, server, host, north) == ""
    assert handshake(ca, server, "elsewhere", north) == "CERTIFICATE_VERIFY_FAILED"
    assert handshake(ca, server, "localhost") != ""
    assert handshake(ca, north, "localhost", north) != "", "a member could pass for the server"


def test_a_certificate_of_another_authority_is_rejected(ca: Path, tmp_path: Path) -> None:
    make_certificate("server", tmp_path, ca, hosts=["localhost"])
    make_ca(tmp_path / "other")
    make_certificate("thief", tmp_path, tmp_path / "other", hosts=["localhost"])
    assert handshake(ca, tmp_path / "thief", "localhost", tmp_path / "server") == "CERTIFICATE_VERIFY_FAILED"
    assert handshake(ca, tmp_path / "server", "localhost", tmp_path / "thief") != ""


def test_contents_of_a_certificate(ca: Path, tmp_path: Path) -> None:
    made = make_certificate("server", tmp_path, ca, hosts=["a.example", "10.0.0.1"], days=7)
    pair = read_key_pair(made.certificate, made.key)
    assert pair.certificate.names == {"URI:urn:fedloom:server", "DNS:a.example", "IP:10.0.0.1"}
    assert pair.certificate.ends == made.ends
    assert timedelta(days=7) - EARLIER < made.ends - datetime.now(UTC) < timedelta(days=7) + EARLIER
    found = x509.load_pem_x509_certificate(pair.chain)
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.0.0.1")]
    authority = make_ca(tmp_path / "short", days=2)  # no certificate outlives it
    assert make_certificate("north", tmp_path, tmp_path / "short", days=30).ends == authority.ends
    for path in (made.key, ca / "ca.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"PRIVATE" not in repr(pair).encode()


def test_existing_files_are_only_replaced_on_request(ca: Path, tmp_path: Path) -> None:
    made = make_certificate("north", tmp_path, ca)
    before = made.certificate.read_bytes(), made.key.read_bytes()
    with pytest.raises(ExperimentError):
        make_certificate("north", tmp_path, ca)
    with pytest.raises(ExperimentError):
        make_ca(ca)
    assert (made.certificate.read_bytes(), made.key.read_bytes()) == before
    make_certificate("north", tmp_path, ca, replace=True)
    assert made.key.read_bytes() != before[1]
    read_key_pair(made.certificate, made.key)


@pytest.mark.parametrize(("made_at", "word"), [(-30, "expired at"), (30, "is not valid before")])
def test_certificates_expire(
    ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_at: int, word: str
) -> None:
    with monkeypatch.context() as patch:
        then = datetime.now(UTC) + timedelta(days=made_at)
        patch.setattr(certificates, "_now", lambda: then)
        made = make_certificate("north", tmp_path, ca, days=10)
        make_ca(tmp_path / "aged", days=10)
    if made_at < 0:  # an expired authority
        with pytest.raises(FedloomError) as error:
            make_certificate("north", tmp_path, tmp_path / "aged")
        assert error.value.exit_code == ExitCode.REFUSED
    with telling(RefusedError, made.certificate, "urn:fedloom:north", word, "UTC", "clock", "UTC"):
        read_key_pair(made.certificate, made.key)


@pytest.mark.parametrize(
    ("certificate", "key", "facts"),
    [
        ("absent", "north/tls.key", ("tls.crt", "absent", "no such file")),
        ("north/tls.crt", "absent", ("tls.key", "absent", "no such file")),
        ("north/tls.key", "north/tls.key", ("tls.crt", "no certificate")),
        ("north/tls.crt", "north/tls.crt", ("tls.key", "no key")),
        ("north/tls.crt", "south/tls.key", ("tls.key", "south/tls.key", "north/tls.crt")),
        ("north/tls.crt", "locked.key", ("tls.key", "encrypted")),
    ],
)
def test_unusable_credentials(ca: Path, tmp_path: Path, certificate: str, key: str, facts: tuple[str, ...]) -> None:
    from cryptography.hazmat.primitives import serialization

    for name in ("north", "south"):
        make_certificate(name, tmp_path, ca)
    private = serialization.load_pem_private_key((tmp_path / "north/tls.key").read_bytes(), None)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = private.private_bytes(encoding, form, serialization.BestAvailableEncryption(b"x"))
    (tmp_path / "locked.key").write_bytes(locked)
    with telling(ExperimentError, *facts) as error:
        read_key_pair(tmp_path / certificate, tmp_path / key)
    assert "PRIVATE KEY" not in str(error.value)


def test_files_of_authorities(ca: Path, tmp_path: Path) -> None:
    make_ca(tmp_path / "next")
    make_certificate("north", tmp_path, ca)
    both = tmp_path / "both.crt"
    both.write_bytes((ca / "ca.crt").read_bytes() + (tmp_path / "next" / "ca.crt").read_bytes())
    assert read_ca(both) == both.read_bytes()
    for wrong, fact in ((tmp_path / "north/tls.crt", "CN=north"), (ca / "ca.key", "no certificate")):
        with telling(ExperimentError, "ca.crt", wrong, fact):
            read_ca(wrong)


def test_on_the_command_line(fedloom: Fedloom, tmp_path: Path) -> None:
    code, out, err = fedloom("certificates", "ca")
    assert code == 0
    assert tells(out, "certificates/ca.crt", "until")
    assert tells(err, "trials", "ca.key")
    code, out, _ = fedloom("certificates", "new", "server", "--host", "localhost", "--out", "mine")
    assert code == 0
    assert tells(out, "mine/server/tls.crt", "URI:urn:fedloom:server", "localhost")
    server = tmp_path / "mine" / "server"
    assert read_key_pair(server / "tls.crt", server / "tls.key")
    assert (server / "ca.crt").read_bytes() == (tmp_path / "certificates" / "ca.crt").read_bytes()
    assert Protection(ServerOptions.from_folder(server)).access is not None
    assert Credentials(ClientOptions.from_folder(server)).current.pair is not None


def test_a_folder_of_credentials(tmp_path: Path, ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_certificate("north", tmp_path, ca).certificate.parent
    token = make_token().get_secret_value()
    environment = {"FEDLOOM_TLS_CA": "elsewhere", "FEDLOOM_TOKEN": token}
    options = ClientOptions.from_folder(made, environment=environment)
    assert (options.ca, options.certificate, options.key) == (made / "ca.crt", made / "tls.crt", made / "tls.key")
    assert options.token.get_secret_value() == token
    (made / "token").write_text(make_token().get_secret_value())
    options = ClientOptions.from_folder(made, environment=environment)
    assert (options.token_file, options.token) == (made / "token", None)
    assert ClientOptions.from_folder(environment=environment).ca == Path("elsewhere")
    for folder in (tmp_path / "absent", ca / "ca.key"):
        with pytest.raises(ExperimentError) as error:
            ClientOptions.from_folder(folder)
        assert (error.value.key, error.value.found) == ("credentials", folder)


def test_a_new_authority_is_added_to_the_old_one(tmp_path: Path, ca: Path) -> None:
    make_certificate("north", tmp_path, ca)
    make_ca(tmp_path / "next")
    made = make_certificate("north", tmp_path, tmp_path / "next", replace=True).certificate.parent
    both = [(folder / "ca.crt").read_bytes() for folder in (ca, tmp_path / "next")]
    assert (made / "ca.crt").read_bytes() == b"".join(both)
    make_certificate("north", tmp_path, ca, replace=True)
    assert (made / "ca.crt").read_bytes() == b"".join(both)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("ca",), ("ca.key", "already")),
        (("new", "ca"), ("NAME", "ca")),
        (("new", "../north"), ("NAME", "../north")),
        (("new", "a", "--host", "https://a:1"), ("--host", "https://a:1")),
        (("new", "a", "--days", "0"), ("--days", "1 to", "0")),
        (("new", "a", "--ca", "absent"), ("absent/ca.crt", "no such file")),
    ],
)
def test_invalid_options(fedloom: Fedloom, tmp_path: Path, arguments: tuple[str, ...], facts: tuple[str, ...]) -> None:
    make_ca(tmp_path / "certificates")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code, out, err = fedloom("certificates", *arguments)
    assert (code, out) == (ExitCode.EXPERIMENT, "")
    assert tells(err, *facts)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


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
    with refusing(RefusedError, "north-1"):
        KeyVerifier([]).verify("north-1", b"keys", signature)


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
