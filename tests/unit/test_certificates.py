"""Certificates for trials, and messages about unusable certificates and keys."""

from __future__ import annotations

import ipaddress
import ssl
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from facts import tells

from fedloom.errors import ExitCode, ExperimentError, FedloomError, RefusedError
from fedloom.security import certificates
from fedloom.security.certificates import EARLIER, make_ca, make_certificate, read_ca, read_key_pair
from fedloom.security.options import ClientOptions, Credentials, Protection, ServerOptions
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
    for path in (made.key, ca / "ca.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"PRIVATE" not in repr(pair).encode()


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    authority = make_ca(tmp_path / "short", days=2)
    assert make_certificate("north", tmp_path, tmp_path / "short", days=30).ends == authority.ends


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
def test_a_certificate_outside_its_validity(
    ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_at: int, word: str
) -> None:
    with monkeypatch.context() as patch:
        then = datetime.now(UTC) + timedelta(days=made_at)
        patch.setattr(certificates, "_now", lambda: then)
        made = make_certificate("north", tmp_path, ca, days=10)
    with pytest.raises(RefusedError) as refused:
        read_key_pair(made.certificate, made.key)
    assert tells(str(refused.value), made.certificate, "urn:fedloom:north", word, "UTC", "clock", "UTC")


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
def test_unusable_credential_files(
    ca: Path, tmp_path: Path, certificate: str, key: str, facts: tuple[str, ...]
) -> None:
    from cryptography.hazmat.primitives import serialization

    for name in ("north", "south"):
        make_certificate(name, tmp_path, ca)
    private = serialization.load_pem_private_key((tmp_path / "north/tls.key").read_bytes(), None)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = private.private_bytes(encoding, form, serialization.BestAvailableEncryption(b"x"))
    (tmp_path / "locked.key").write_bytes(locked)
    with pytest.raises(ExperimentError) as error:
        read_key_pair(tmp_path / certificate, tmp_path / key)
    assert tells(str(error.value), *facts)
    assert "PRIVATE KEY" not in str(error.value)


def test_files_of_authorities(ca: Path, tmp_path: Path) -> None:
    make_ca(tmp_path / "next")
    make_certificate("north", tmp_path, ca)
    both = tmp_path / "both.crt"
    both.write_bytes((ca / "ca.crt").read_bytes() + (tmp_path / "next" / "ca.crt").read_bytes())
    assert read_ca(both) == both.read_bytes()
    for wrong, fact in ((tmp_path / "north/tls.crt", "CN=north"), (ca / "ca.key", "no certificate")):
        with pytest.raises(ExperimentError) as error:
            read_ca(wrong)
        assert tells(str(error.value), "ca.crt", wrong, fact)


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
    assert options.token is not None
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
def test_invalid_arguments(
    fedloom: Fedloom, tmp_path: Path, arguments: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    make_ca(tmp_path / "certificates")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code, out, err = fedloom("certificates", *arguments)
    assert (code, out) == (ExitCode.EXPERIMENT, "")
    assert tells(err, *facts)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_expired_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_now", lambda: datetime.now(UTC) - timedelta(days=30))
        make_ca(tmp_path, days=10)
    with pytest.raises(FedloomError) as error:
        make_certificate("north", tmp_path, tmp_path)
    assert error.value.exit_code == ExitCode.REFUSED
