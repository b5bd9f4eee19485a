"""Access: tokens, the identity file, reloaded files, and secrets that are never shown."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from facts import telling, tells
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from work import lines_run

from fedloom.errors import ExitCode, ExperimentError, FedloomError, RefusedError
from fedloom.security.access import (
    ALLOWED,
    MAX_CLIENTS,
    SHARED,
    Access,
    Action,
    Admitted,
    Denied,
    Identity,
    PeerCredentials,
    Role,
    read_identities,
)
from fedloom.security.audit import KINDS, LONGEST, REPEATED_S, Audit
from fedloom.security.certificates import Certificate
from fedloom.security.files import ReloadingFile, read_text
from fedloom.security.tokens import (
    Tokens,
    add_token,
    checked_token,
    keep_token,
    make_token,
    read_secret,
    read_tokens,
    revoke_tokens,
)

Fedloom = Callable[..., tuple[int, str, str]]

TABLE = """\
version: 1
identities:
  - {name: north, certificate: "URI:urn:fedloom:north", roles: [worker], clients: ["north-*"]}
  - {name: south, token: south, roles: [worker, watch], clients: [south-1, south-2]}
  - {name: both, certificate: "DNS:both.example.org", token: second, roles: [admin]}
  - {name: eye, token: eye, roles: [observer], clients: ["eye-?"]}
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "identities.yaml"
    path.write_text(TABLE)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def certificate(*names: str, days: float = 1) -> Certificate:
    now = datetime.now(UTC)
    return Certificate(frozenset(names), "f" * 64, now - timedelta(days=1), now + timedelta(days=days))


# ---- tokens


def secret(token: SecretStr) -> str:
    return token.get_secret_value().split("_", 2)[2]


def test_a_token_of_256_bits_is_found_only_by_its_hash(tokens: Path) -> None:
    token, entry = add_token(tokens, "north")
    other = make_token()
    kept = read_tokens(tokens)
    assert kept.find(token) == entry
    assert kept.find(other) is None
    secrets = {secret(each) for each in (token, *(make_token() for _ in range(50)))}
    assert {len(each) for each in secrets} == {43}  # 32 bytes, base64
    assert len(secrets) == 51
    assert secret(token) not in tokens.read_text()


@given(st.text(max_size=80))
def test_invalid_tokens_match_no_identity(text: str) -> None:
    entry = keep_token("a", make_token())
    known = Tokens((entry,))
    assert known.find(SecretStr(text)) is None
    assert known.find(SecretStr(f"fedloom_{entry.id}_{text}")) is None
    assert known.find(SecretStr(f"fedloom_{entry.id}_" + "A" * 43)) is None


def test_the_token_file_is_readable_only_by_its_owner(tokens: Path) -> None:
    add_token(tokens, "north")
    before = tokens.stat().st_ino
    add_token(tokens, "south")
    assert stat.S_IMODE(tokens.stat().st_mode) == 0o600
    assert tokens.stat().st_ino != before, "written in place: a reader could see half of it"


def _add(path: str, name: str) -> None:
    add_token(Path(path), name)


def test_concurrent_writers_lose_nothing(tokens: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add, args=(str(tokens), f"m-{i}")) for i in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(token.name for token in read_tokens(tokens).all) == [f"m-{i}" for i in range(8)]


def test_revoking_by_id_and_by_name(tokens: Path) -> None:
    _, first = add_token(tokens, "north")
    _, second = add_token(tokens, "north")
    _, other = add_token(tokens, "south")
    assert [token.id for token in revoke_tokens(tokens, first.id)] == [first.id]
    assert [token.id for token in revoke_tokens(tokens, "north")] == [second.id]
    assert revoke_tokens(tokens, "north") == []
    now = datetime.now(UTC)
    states = {token.id: token.state(now) for token in read_tokens(tokens).all}
    assert states == {first.id: "revoked", second.id: "revoked", other.id: "valid"}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ("[]", "mapping"),
        ("[" * 100_000, "damaged"),
        ('{"version": 2, "tokens": []}', "version"),
        ('{"version": 1, "tokens": [{"id": "x"}]}', "tokens.0.id"),
        ('{"version": 1, "tokens": [], "more": 1}', "more"),
    ],
)
def test_a_damaged_token_file(tokens: Path, content: str, found: str) -> None:
    tokens.write_text(content)
    with telling(ExperimentError, tokens, found):
        read_tokens(tokens)
    with pytest.raises(ExperimentError):
        add_token(tokens, "north")
    assert tokens.read_text() == content


def test_errors_about_a_damaged_token_file_reveal_none_of_it(tokens: Path) -> None:
    """JSON's errors contain the whole document, which may be a token saved to the wrong file."""
    token = make_token()
    tokens.write_text(token.get_secret_value())
    with pytest.raises(ExperimentError) as error:
        read_tokens(tokens)
    assert token.get_secret_value() not in repr(error.value) + str(error.value)
    assert error.value.__cause__ is None


def test_invalid_tokens_are_rejected_without_being_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("hunter2 and more\n")
    with pytest.raises(RefusedError) as refused:
        read_secret(path)
    assert "hunter2" not in str(refused.value)
    token = make_token()
    path.write_text(f"{token.get_secret_value()}\n")
    assert read_secret(path) == token
    assert token.get_secret_value() not in repr(checked_token(token.get_secret_value(), "here"))


# ---- the identity file


def test_the_identity_file(table: Path) -> None:
    found = read_identities(table)
    north = found.find(frozenset({"URI:urn:fedloom:north", "DNS:elsewhere"}), None)
    assert [each.name for each in north] == ["north"]
    assert north[0].foreign(["north-1", "northern", "south-1", "xnorth-1", "north-"]) == [
        "northern",
        "south-1",
        "xnorth-1",
    ]
    assert [each.name for each in found.find(frozenset(), "south")] == ["south"]
    assert found.find(frozenset({"DNS:urn:fedloom:north"}), None) == []
    assert found.find(frozenset({"DNS:both.example.org"}), None) == []
    assert [each.name for each in found.find(frozenset({"DNS:both.example.org"}), "second")] == ["both"]
    assert len(found.find(frozenset({"URI:urn:fedloom:north"}), "south")) == 2


@pytest.mark.parametrize(
    ("pattern", "client", "allowed"),
    [
        ("*", "anything-1.2_3", True),
        ("a*", "a", True),
        ("a*", "ba", False),
        ("a?", "a", False),
        ("a?", "ab", True),
        ("a.b", "aXb", False),
        ("a*b*c", "a1b2c3", False),
        ("a*b*c", "a1b2c", True),
        ("*", "../a", False),
        ("*", "a\n", False),
        ("?", "/", False),
        ("*" * 100 + "z", "a" * 127, False),
        ("a*ab*b", "ab", False),
        ("a*ab*b", "aabb", True),
        ("*?b*?", "aaba", True),
        ("*?b*?", "aab", False),
        ("a*?", "a", False),
    ],
)
def test_client_patterns(pattern: str, client: str, allowed: bool) -> None:
    assert Identity("n", frozenset({Role.WORKER}), (pattern,)).speaks_for(client) is allowed


@given(st.text("ab*?.", min_size=1, max_size=12), st.text("ab.", min_size=1, max_size=12))
def test_patterns_match_as_in_a_shell(pattern: str, client: str) -> None:
    whom = Identity("n", frozenset({Role.WORKER}), (pattern, "c*"))
    assert whom.speaks_for(client) is fnmatchcase(client, pattern)


def test_a_pattern_with_many_stars_takes_linear_time() -> None:
    """Each part occurs many times, and the last one never."""
    whom = Identity("n", frozenset({Role.WORKER}), ("*a" * 60 + "*b", "*a?a*a?a*a?a*a?a*a?a*z"))
    started = time.perf_counter()
    assert whom.foreign(["a" * 128] * 200) == ["a" * 128] * 200
    assert time.perf_counter() - started < 5


def test_the_client_limit_of_an_identity_applies_beyond_its_pattern(tmp_path: Path) -> None:
    path = tmp_path / "identities.yaml"
    entries = ('clients: ["a-1", "a-2"]', 'clients: ["a-*"]', 'clients: ["a-*"], max_clients: 5')
    path.write_text(
        "version: 1\nidentities:\n"
        + "".join(f"  - {{name: n{i}, token: t{i}, roles: [worker], {more}}}\n" for i, more in enumerate(entries))
    )
    found = read_identities(path)
    most = [found.find(frozenset(), f"t{i}")[0].max_clients for i in range(3)]
    assert most == [2, MAX_CLIENTS, 5]
    path.write_text('version: 1\nidentities: [{name: n, token: t, roles: [worker], clients: ["*"], max_clients: 0}]\n')
    with telling(ExperimentError, "max_clients", 0):
        read_identities(path)


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="libyaml makes it fast")
def test_an_identity_file_of_thousands_is_read_and_searched_fast(tmp_path: Path) -> None:
    """Reading takes little longer than libyaml alone, and a lookup does not scan the file."""
    path = tmp_path / "identities.yaml"
    entry = '  - {{name: m-{0}, certificate: "URI:urn:m-{0}", roles: [worker], clients: ["c{0}-*"]}}\n'
    path.write_text("version: 1\nidentities:\n" + "".join(map(entry.format, range(2_000))))
    assert lines_run(lambda: read_identities(path)) < 2 * lines_run(
        lambda: yaml.load(path.read_text(), yaml.CSafeLoader)
    )
    found = read_identities(path)

    def look_up() -> None:
        for i in range(100):
            (one,) = found.find(frozenset({f"URI:urn:m-{i}"}), None)
            assert one.speaks_for(f"c{i}-7")

    look_up()
    assert lines_run(look_up) < 100 * 400


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("version: 1", "version: 2", ("line 1", "version", "must be 1", "got 2")),
        (
            "roles: [worker],",
            "roles: [boss],",
            ("line 3", "roles", "'worker', 'observer', 'personalize', 'watch' or 'admin'", "boss"),
        ),
        ("roles: [worker],", "roles: [],", ("line 3", "roles", "1 item", "got []")),
        ("roles: [worker],", "role: worker,", ("line 3", "role", "unknown key", "roles")),
        ('clients: ["north-*"]', "clients: []", ("line 3", "clients", "worker")),
        ('clients: ["north-*"]', 'clients: ["a/b"]', ("line 3", "clients.0", "a/b")),
        ('"URI:urn:fedloom:north"', "north", ("line 3", "certificate", "URI|DNS", "north")),
        ('certificate: "URI:urn:fedloom:north", ', "", ("line 3", "certificate", "token")),
        ("roles: [admin]", "roles: [admin], clients: [a]", ("line 5", "clients", "admin")),
        ("name: south", "name: north", ("line 3", "name", "north", "line 4", "name", "north")),
        ("token: eye", "token: south", ("line 4", "token south", "line 6", "token south")),
        ("version: 1", "version: 1\nversion: 1", ("line 1", "version", "line 2")),
        ("version: 1", "version: [", ("not YAML",)),
        (TABLE, "- 1", ("version", "identities")),
    ],
)
def test_errors_in_the_identity_file(table: Path, old: str, new: str, expected: tuple[str, ...]) -> None:
    assert old in TABLE
    table.write_text(TABLE.replace(old, new))
    with telling(ExperimentError, table, *expected):
        read_identities(table)


def test_a_token_in_the_identity_file_is_rejected_without_being_shown(table: Path) -> None:
    token = make_token()
    table.write_text(TABLE.replace("token: south", f"token: {token.get_secret_value()}"))
    with pytest.raises(ExperimentError) as error:
        read_identities(table)
    assert token.get_secret_value() not in str(error.value)
    assert tells(str(error.value), table, "token")


# ---- authentication


def test_each_role_has_the_documented_permissions() -> None:
    for role in Role:
        identity = Identity("n", frozenset({role}), ("*",))
        assert {action for action in Action if identity.may(action)} == ALLOWED[role]
    assert set(ALLOWED) == set(Role)
    assert not Identity("n", frozenset({Role.WATCH})).speaks_for("")


def test_authentication_by_token_and_by_certificate(table: Path, tokens: Path) -> None:
    south, kept = add_token(tokens, "south")
    stranger = make_token()
    access = Access(tokens, table)
    admitted = access.admit(PeerCredentials(token=south), Action.TRAIN)
    assert (admitted.identity.name, admitted.token, admitted.ends) == ("south", kept, None)
    north = certificate("URI:urn:fedloom:north")
    assert access.admit(PeerCredentials(north), Action.TRAIN).ends == north.ends
    for action in Action:
        with pytest.raises(Denied) as denied:
            access.admit(PeerCredentials(), action)
        assert denied.value.identity is None
    for presented in (
        PeerCredentials(token=stranger),
        PeerCredentials(certificate("URI:urn:fedloom:nobody")),
        PeerCredentials(certificate()),
        PeerCredentials(north, south),  # two identities
        PeerCredentials(north, stranger),  # a wrong token is not ignored
        PeerCredentials(certificate("URI:urn:fedloom:north", days=-0.1)),
    ):
        with pytest.raises(Denied):
            access.admit(presented, Action.TRAIN)


def test_an_unauthorized_peer_learns_its_identity(table: Path, tokens: Path) -> None:
    eye, _ = add_token(tokens, "eye")
    access = Access(tokens, table)
    assert access.admit(PeerCredentials(token=eye), Action.MEASURE).identity.name == "eye"
    with pytest.raises(Denied) as denied:
        access.admit(PeerCredentials(token=eye), Action.TRAIN)
    assert denied.value.identity is not None
    assert tells(str(denied.value), "eye", "train", "observer")


def test_without_an_identity_file_every_known_peer_may_work_watch_and_request_models(tokens: Path) -> None:
    token, _ = add_token(tokens, "south")
    identity = Access(tokens).admit(PeerCredentials(token=token), Action.TRAIN).identity
    assert (identity.name, identity.roles) == ("south", {Role.WORKER, Role.PERSONALIZE, Role.WATCH})
    assert identity.speaks_for("anyone")
    assert (
        Access().admit(PeerCredentials(certificate("URI:urn:fedloom:a")), Action.WATCH).identity.name
        == "URI:urn:fedloom:a"
    )
    with pytest.raises(Denied):
        Access(tokens).admit(PeerCredentials(token=token), Action.CONTROL)
    with pytest.raises(Denied):
        Access().admit(PeerCredentials(token=token), Action.TRAIN)


def test_a_shared_token_is_in_no_file(table: Path, tokens: Path) -> None:
    add_token(tokens, "south")
    shared = make_token()
    one, other = Access(tokens, table, shared=shared), Access(tokens, table, shared=make_token())
    admitted = one.admit(PeerCredentials(token=shared), Action.TRAIN)
    assert admitted.identity == SHARED
    one.check(admitted, Action.TRAIN)
    assert one.admit(PeerCredentials(token=shared), Action.WATCH)
    for access, action in ((one, Action.CONTROL), (other, Action.TRAIN)):
        with pytest.raises(Denied):
            access.admit(PeerCredentials(token=shared), action)


def revoked(access: Access, admitted: Admitted) -> Denied | None:
    access.refresh()
    try:
        access.check(admitted, Action.TRAIN)
    except Denied as denied:
        return denied
    return None


def test_a_token_revoked_during_use(table: Path, tokens: Path) -> None:
    south, kept = add_token(tokens, "south")
    second, _ = add_token(tokens, "south")
    access = Access(tokens, table)
    admitted = access.admit(PeerCredentials(token=south), Action.TRAIN)
    assert revoked(access, admitted) is None
    revoke_tokens(tokens, kept.id)
    denied = revoked(access, admitted)
    assert tells(str(denied), kept.id, "south", "revoked")
    assert not denied.again
    assert access.admit(PeerCredentials(token=second), Action.TRAIN).identity.name == "south"
    with pytest.raises(Denied, match="revoked"):
        access.admit(PeerCredentials(token=south), Action.TRAIN)


def test_an_identity_removed_or_restricted_during_use(table: Path, tokens: Path) -> None:
    access = Access(tokens if tokens.exists() else None, table)
    admitted = access.admit(PeerCredentials(certificate("URI:urn:fedloom:north")), Action.TRAIN)
    table.write_text(TABLE.replace('clients: ["north-*"]', 'clients: ["north-1"]'))
    denied = revoked(access, admitted)
    assert denied.again
    table.write_text(TABLE.replace("URI:urn:fedloom:north", "URI:urn:fedloom:elsewhere"))
    denied = revoked(access, admitted)
    assert not denied.again


def test_a_token_and_a_certificate_that_expire_during_use(tokens: Path) -> None:
    now = [datetime.now(UTC)]
    token, kept = add_token(tokens, "south", days=1)
    access = Access(tokens, now=lambda: now[0])
    by_token = access.admit(PeerCredentials(token=token), Action.TRAIN)
    by_certificate = access.admit(PeerCredentials(certificate("DNS:a", days=1)), Action.TRAIN)
    now[0] += timedelta(hours=23)
    assert (revoked(access, by_token), revoked(access, by_certificate)) == (None, None)
    now[0] += timedelta(hours=1, seconds=1)
    by_token_denied, by_certificate_denied = revoked(access, by_token), revoked(access, by_certificate)
    assert tells(str(by_token_denied), "expired at")
    assert tells(str(by_certificate_denied), "DNS:a", "expired at", "clock")
    assert (by_token_denied.again, by_certificate_denied.again) == (False, True)
    assert (by_token.ends, by_certificate.ends) == (kept.expires, by_certificate.certificate.ends)


@pytest.mark.parametrize("content", ["", "{", '{"version": 1}', "fedloom_" + "0" * 12 + "_" + "A" * 43])
def test_later_damage_is_ignored(table: Path, tokens: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    south, kept = add_token(tokens, "south")
    access = Access(tokens, table)
    good, before = [tokens.read_text(), table.read_text()], access.refresh()
    with caplog.at_level(logging.WARNING, "fedloom.security"):
        for path in (tokens, table):
            path.write_text(content)
        assert access.refresh() == before
        assert access.refresh() == before
    assert len(caplog.records) == 2, "said once for each file"
    assert all(tells(record.getMessage(), "in force", tokens.parent) for record in caplog.records)
    assert access.admit(PeerCredentials(token=south), Action.TRAIN).token == kept
    tokens.write_text(good[0].replace('"revoked": null', '"revoked": "2026-01-01T00:00:00Z"'))
    table.write_text(good[1])
    assert access.refresh() == {tokens: 1, table: 0}
    with pytest.raises(Denied, match="revoked"):
        access.admit(PeerCredentials(token=south), Action.TRAIN)


def test_a_file_removed_later_changes_nothing(tokens: Path) -> None:
    token, _ = add_token(tokens, "south")
    access = Access(tokens)
    tokens.unlink()
    assert access.refresh() == {tokens: 0}
    assert access.admit(PeerCredentials(token=token), Action.TRAIN)


def test_a_file_that_changes_during_a_read_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1")

    def read() -> str:
        text = path.read_text()
        if text == "1":
            path.write_text("22")
        return text

    file = ReloadingFile([path], read)
    assert file.value == "1"
    assert file.refresh() == 1
    assert file.value == "22"
    assert file.refresh() == 1


def test_files_under_replacement_are_read_once_complete(tmp_path: Path) -> None:
    path, tries = tmp_path / "a", []

    def read() -> str:
        tries.append(path.read_text())
        if len(tries) == 1:
            path.write_text("whole")
            raise ExperimentError("half of it is missing")
        return tries[-1]

    path.write_text("half")
    assert ReloadingFile([path], read).value == "whole"
    always: list[str] = []
    with pytest.raises(ZeroDivisionError):
        ReloadingFile([path], lambda: always.append("") or 1 // 0)
    assert len(always) == 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "absent", "bytes"])
def test_paths_that_are_not_files_are_rejected_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "bytes":
            path.write_bytes(b"\xff")
    with telling(FedloomError, "--tls-key", path):
        read_text(path, "--tls-key")


# ---- the audit log


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_audit_log(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(path)
    audit.write("join", identity="north", clients=3)
    audit.write("settings", file="x\n\u2028\x1b[31m" + "y" * 2 * LONGEST)
    first, second = lines(path)
    assert (first["event"], first["identity"], first["clients"]) == ("join", "north", 3)
    assert datetime.fromisoformat(str(first["time"])).tzinfo is not None
    assert len(str(second["file"])) == LONGEST
    assert path.read_text().isascii()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.rename(tmp_path / "old")
    audit.write("leave", identity="north")
    assert [line["event"] for line in lines(path)] == ["leave"]


def test_repeated_rejections_are_counted_instead_of_logged(tmp_path: Path) -> None:
    now = [0.0]
    audit = Audit(tmp_path / "audit.jsonl", clock=lambda: now[0])
    for _ in range(100):
        audit.refused("10.0.0.1", "token", reason="a")
    audit.refused("10.0.0.2", "token", reason="a")
    now[0] += REPEATED_S
    audit.refused("10.0.0.1", "token", reason="b")
    found = [(line["host"], line["reason"], line.get("repeated")) for line in lines(tmp_path / "audit.jsonl")]
    assert found == [("10.0.0.1", "a", None), ("10.0.0.2", "a", None), ("10.0.0.1", "b", 99)]


def test_a_flood_from_many_hosts_fills_neither_memory_nor_disk(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", clock=lambda: 0.0)
    for i in range(3 * KINDS):
        audit.refused(f"host-{i}", "token")
    assert len(lines(tmp_path / "audit.jsonl")) == KINDS + 1
    assert len(audit._refused) == KINDS + 1


# ---- the commands


def test_managing_a_token_on_the_command_line(fedloom: Fedloom, tmp_path: Path) -> None:
    code, out, err = fedloom("token", "new", "north", "--days", "30")
    assert code == 0
    token, id = out.strip(), out.split("_")[1]
    assert tells(err, id, "north", "tokens.json")
    assert token not in err
    code, out, err = fedloom("token", "new", "south", "--out", "south.token")
    assert (code, out) == (0, "")
    assert stat.S_IMODE((tmp_path / "south.token").stat().st_mode) == 0o600
    assert read_secret(tmp_path / "south.token")
    code, out, _ = fedloom("token", "list")
    assert tells(out, id, "valid", "north", "\n", "valid", "south", "for ever")
    assert fedloom("token", "revoke", "north")[:2] == (0, f"revoked {id} of north\n")
    code, out, _ = fedloom("token", "list")
    assert tells(out, id, "revoked", "north")
    assert token not in out
    assert fedloom("token", "revoke", "north")[1] == ""


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("new", "a b"), ("NAME", "a b")),
        (("new", "a", "--out", "there"), ("there", "already")),
        (("revoke", "nobody"), ("tokens.json", "nobody", "known")),
        (("list", "--tokens", "absent.json"), ("absent.json", "no such file")),
    ],
)
def test_token_errors(fedloom: Fedloom, tmp_path: Path, arguments: tuple[str, ...], facts: tuple[str, ...]) -> None:
    add_token(tmp_path / "tokens.json", "known")
    (tmp_path / "there").write_text("mine")
    code, out, err = fedloom("token", *arguments)
    assert (code, out) == (ExitCode.EXPERIMENT, "")
    assert tells(err, *facts)
    assert [token.name for token in read_tokens(tmp_path / "tokens.json").all if token.revoked is None] == ["known"]
    assert (tmp_path / "there").read_text() == "mine"
