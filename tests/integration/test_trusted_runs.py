"""Whole runs whose aggregator authenticates peers: processes with certificates and tokens, as a user starts them."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from facts import tells
from ports import free_address
from run_processes import ended, experiment, fedloom, final, rounds, started, until, worker

from fedloom.errors import ExitCode
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.options import ClientOptions, Credentials
from fedloom.security.tokens import add_token, make_token, revoke_tokens
from fedloom.transport.control import follow

TINY = {
    "federation": {"rounds": 2, "clients_per_round": 3},
    "model": {"name": "logistic"},
    "algorithm": {"name": "fedavg"},
}

TABLE = """\
version: 1
identities:
  - {name: north, certificate: "URI:urn:fedloom:north", token: north, roles: [worker], clients: ["*"]}
  - {name: eye, certificate: "URI:urn:fedloom:eye", token: eye, roles: [watch]}
"""


@pytest.mark.slow
def test_mutual_tls_with_tokens_gives_equal_results(tmp_path: Path, fashion_mnist_root: Path) -> None:
    path = experiment(tmp_path, fashion_mnist_root, **TINY)
    fedloom("run", path, "--out", tmp_path / "alone")
    make_ca(tmp_path / "ca")
    make_certificate("server", tmp_path, tmp_path / "ca", hosts=["127.0.0.1"])
    make_certificate("eye", tmp_path, tmp_path / "ca")
    make_certificate("north", tmp_path, tmp_path / "ca")
    server, north = tmp_path / "server", tmp_path / "north"
    secrets = {name: add_token(server / "tokens.json", name)[0] for name in ("north", "eye")}
    (north / "token").write_text(secrets["north"].get_secret_value())
    (server / "identities.yaml").write_text(TABLE)
    fedloom("partition", path, "--out", tmp_path / "partition")
    address = free_address()
    out = tmp_path / "run"
    mine = {"FEDLOOM_TLS_CA": str(north / "ca.crt"), "FEDLOOM_TLS_CERTIFICATE": str(north / "tls.crt")}
    mine |= {"FEDLOOM_TLS_KEY": str(north / "tls.key")}
    serve = ("--credentials", server)
    dials = ["worker", "--aggregator", address, "--partition", tmp_path / "partition"]
    with started("aggregator", path, "--listen", address, "--out", out, "--wait", "120", *serve) as aggregator:
        eye = replace(ClientOptions.from_folder(tmp_path / "eye"), token=secrets["eye"])
        watched = follow(address, connect_s=120, credentials=Credentials(eye))
        assert next(watched).workers == ()
        stranger = {**mine, "FEDLOOM_TOKEN": make_token().get_secret_value()}
        output = fedloom(*dials, environment=stranger, code=ExitCode.REFUSED)
        assert tells(output, "error:", address, "not known")
        fedloom(*dials, "--credentials", north)
        states = [progress.phase for progress in watched]
        assert states[-1] == "finished"
        ended(aggregator, 0)
    assert final(out) == final(tmp_path / "alone")
    audit = out / "logs" / "audit.jsonl"
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600
    events = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(event["event"], event["identity"]) for event in events if event["event"] != "leave"] == [
        ("join", "eye"), ("refused", None), ("join", "north"),
    ]  # fmt: skip
    kept = b"".join(file.read_bytes() for file in out.rglob("*") if file.is_file())
    for token in (*secrets.values(), stranger["FEDLOOM_TOKEN"]):
        text = token if isinstance(token, str) else token.get_secret_value()
        assert text.split("_", 2)[2].encode() not in kept  # the secret itself may have underscores
        assert text not in output


def test_workers_of_a_run_authenticate_with_its_own_secret_token(tmp_path: Path, fashion_mnist_root: Path) -> None:
    path = experiment(tmp_path, fashion_mnist_root, **TINY, runtime={"workers": 1})
    elsewhere = {"FEDLOOM_TLS_CA": "/absent/ca.crt", "FEDLOOM_TOKEN": make_token().get_secret_value()}
    endless = ["--set", "federation.rounds=100000"]
    with started("run", path, "--out", tmp_path / "run", *endless, environment=elsewhere) as run:
        until(lambda: worker(run, "worker-0"), "a worker")
        pid = worker(run, "worker-0")
        assert pid is not None
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        address = words[words.index(b"--aggregator") + 1].decode()
        journal = tmp_path / "run" / "journal.jsonl"
        until(lambda: journal.exists() and journal.read_text().count("\n") > 2, "rounds")
        partition = words[words.index(b"--partition") + 1].decode()
        output = fedloom("worker", "--aggregator", address, "--partition", partition, code=ExitCode.REFUSED)
        assert tells(output, "error:", address, "certificate", "token")
        assert not any(b"fedloom_" in word for word in words)


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "facts"),
    [
        (
            ("aggregator", "{e}", "--listen", "0.0.0.0:0"),
            {},
            2,
            ("--listen", "0.0.0.0", "tls.crt", "--insecure", "--credentials"),
        ),
        (("aggregator", "{e}", "--credentials", "absent"), {}, 2, ("--credentials", "absent")),
        (("aggregator", "{e}"), {"FEDLOOM_TLS_KEY": "absent"}, 2, ("tls.crt", "tls.key")),
        (("aggregator", "{e}"), {"FEDLOOM_TOKENS": "absent"}, 2, ("absent", "no such file")),
        (("aggregator", "{e}"), {"FEDLOOM_TOKEN": "secret"}, 4, ("FEDLOOM_TOKEN", "6 characters")),
        (
            ("worker", "--aggregator", "h:1", "--partition", "p"),
            {"FEDLOOM_TOKEN": "{t}"},
            2,
            ("h", "plaintext", "--insecure"),
        ),
        (
            ("worker", "--aggregator", "h:1", "--partition", "p"),
            {"FEDLOOM_TLS_CA": "absent"},
            2,
            ("ca.crt", "absent"),
        ),
    ],
)
def test_errors_are_reported_before_anything_is_read_or_created(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], code: int, facts: tuple[str, ...]
) -> None:
    token = make_token().get_secret_value()
    given = {name: value.format(t=token) for name, value in environment.items()}
    output = fedloom(*(word.format(e=tmp_path / "absent.yaml") for word in arguments), environment=given, code=code)
    assert tells(output, "error:", *facts)
    assert token not in output
    assert "secret" not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_revoked_member_is_disconnected_and_the_run_waits_for_another(
    tmp_path: Path, fashion_mnist_root: Path
) -> None:
    path = experiment(tmp_path, fashion_mnist_root, **TINY)
    fedloom("partition", path, "--out", tmp_path / "partition")
    tokens, address = tmp_path / "server" / "tokens.json", free_address()
    tokens.parent.mkdir()
    first, second = (add_token(tokens, name)[0].get_secret_value() for name in ("first", "second"))
    dials = ["worker", "--aggregator", address, "--partition", tmp_path / "partition", "--reconnect", "120"]
    audit = tmp_path / "audit.jsonl"
    serve = ["--listen", address, "--out", tmp_path / "run", "--credentials", tokens.parent, "--audit", audit]
    endless = ["--set", "federation.rounds=100000", "--set", "evaluation.every=100000"]
    with (
        started("aggregator", path, *serve, *endless),
        started(*dials, environment={"FEDLOOM_TOKEN": first}) as gone,
    ):
        run = tmp_path / "run"
        until(lambda: (run / "journal.jsonl").exists() and rounds(run) > 1, "rounds")
        revoke_tokens(tokens, "first")
        assert tells(ended(gone, ExitCode.REFUSED), "first", "revoked at")
        before = rounds(run)
        with started(*dials, environment={"FEDLOOM_TOKEN": second}):
            until(lambda: rounds(run) > before + 2, "more rounds")
    assert not (run / "logs" / "audit.jsonl").exists()
    events = [json.loads(line) for line in audit.read_text().splitlines()]
    reported = [(event["event"], event.get("identity")) for event in events if event["event"] in ("join", "revoked")]
    assert reported == [("join", "first"), ("revoked", "first"), ("join", "second")]
