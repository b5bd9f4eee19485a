"""Access to an aggregator over real sockets, with certificates of a test authority."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from facts import tells
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import SecretStr
from transport_support import Hostile, Proxy, Worker, expected, make_aggregator, start_call, step_call, until

import fedloom
from fedloom.cluster.progress_client import ProgressClient
from fedloom.data.manifest import ClientEntry
from fedloom.errors import AbandonedError, ExitCode, ExperimentError, FedloomError, QuorumError, RefusedError
from fedloom.federation.monitor import Control, Monitor
from fedloom.federation.roster import AvailableClients
from fedloom.security import access, audit, certificates
from fedloom.security.access import Role, read_identities
from fedloom.security.audit import Audit
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.files import ReloadingFile
from fedloom.security.options import FILES, ClientOptions, Credentials, Protection, ServerOptions
from fedloom.security.tokens import add_token, make_token, revoke_tokens, token_id
from fedloom.transport import control, gate, stream, worker_connection
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.codec import encode
from fedloom.transport.control import follow
from fedloom.transport.control_service import ProgressPublisher
from fedloom.transport.frames import seal_frame, serialize
from fedloom.transport.newcomer import Models
from fedloom.transport.personalization import Personalization
from fedloom.transport.versions import PROTOCOL
from fedloom.transport.wire import control_pb2
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.transport.wire import personalization_pb2 as models

CLIENTS = ("a-1", "a-2", "b-1")

TABLE = """\
version: 1
identities:
  - {name: north, certificate: "URI:urn:fedloom:north", roles: [worker], clients: ["a-*", "b-*"]}
  - {name: south, certificate: "URI:urn:fedloom:south", roles: [worker], clients: ["b-*"]}
"""

BY_ROLE = "version: 1\nidentities:\n" + "".join(
    f"  - {{name: {role}, token: {role}, roles: [{role}]"
    + (', clients: ["a-*"]' if role in ("worker", "observer", "personalize") else "")
    + "}\n"
    for role in Role
)


class Federation:
    """An aggregator with TLS, an identity file and tokens, and its members' credentials."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, self.tokens, self.table = folder / "ca", folder / "tokens.json", folder / "identities.yaml"
        self.audit = folder / "audit.jsonl"
        make_ca(self.ca)
        make_certificate("server", folder, self.ca, hosts=["localhost", "127.0.0.1"])
        self.running: list[Aggregator] = []
        self.workers: list[Worker] = []
        self.address = ""

    def start(self, table: str | None = TABLE, *, mutual=True, tokens=False, **changes) -> Aggregator:
        if table is not None:
            self.table.write_text(table)
        if tokens and not self.tokens.exists():
            add_token(self.tokens, "nobody")
        options = ServerOptions(
            certificate=self.folder / "server" / "tls.crt",
            key=self.folder / "server" / "tls.key",
            ca=self.ca / "ca.crt" if mutual else None,
            tokens=self.tokens if tokens else None,
            identities=None if table is None else self.table,
        )
        aggregator = make_aggregator(protection=Protection(options), audit=Audit(self.audit), **changes)
        self.running.append(aggregator)
        self.address = aggregator.start("127.0.0.1:0")
        return aggregator

    def member(self, name: str | None, *, token: str | None = None, ca: Path | None = None, days=30) -> Credentials:
        """Return the credentials of a member, with a new certificate; a token is stored by name."""
        certificate = key = token_file = None
        if name is not None:
            made = make_certificate(name, self.folder, ca or self.ca, days=days, replace=True)
            certificate, key = made.certificate, made.key
        if token is not None:
            token_file = self.folder / f"{token}.token"
            token_file.write_text(add_token(self.tokens, token)[0].get_secret_value())
        return Credentials(
            ClientOptions(ca=self.ca / "ca.crt", certificate=certificate, key=key, token_file=token_file)
        )

    def worker(self, credentials: Credentials, name="w", clients=CLIENTS, **options) -> Worker:
        worker = Worker(self.address, name, clients, credentials=credentials, **options)
        self.workers.append(worker)
        return worker

    def events(self, kind: str | None = None) -> list[dict]:
        lines = self.audit.read_text().splitlines() if self.audit.exists() else []
        return [line for line in map(json.loads, lines) if kind is None or line["event"] == kind]

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop.set()
        for aggregator in self.running:
            aggregator.stop()
        for worker in self.workers:
            worker.leave()


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    monkeypatch.setattr(gate, "CHECK_S", 0.05)
    monkeypatch.setattr(worker_connection, "CHANGED_S", 0.05)
    federation = Federation(tmp_path)
    yield federation
    federation.stop()


def answers_are_right(aggregator: Aggregator, calls: list) -> None:
    """Check that another exchange gives the same results as without a wire."""
    answers = aggregator.exchange(calls[-1])
    for row, answer in enumerate(answers):
        assert torch.equal(answer.x[0], expected(calls, row)[0]), answer


def ended(worker: Worker) -> FedloomError:
    worker.thread.join(20)
    assert isinstance(worker.error, FedloomError), worker.error
    return worker.error


# ---- a conversation


@pytest.mark.parametrize("by", ["certificate", "token", "both"])
def test_a_conversation_over_tls(federation: Federation, by: str) -> None:
    table = {"certificate": 'certificate: "URI:urn:fedloom:x"', "token": "token: x"}
    given = table["certificate"] + ", " + table["token"] if by == "both" else table[by]
    text = f'version: 1\nidentities:\n  - {{name: x, {given}, roles: [worker], clients: ["*"]}}\n'
    aggregator = federation.start(text, mutual=by != "token", tokens=by != "certificate")
    federation.worker(federation.member("x" if by != "token" else None, token="x" if by != "certificate" else None))
    aggregator.wait_for(CLIENTS, 10)
    calls = [start_call(CLIENTS)]
    answers_are_right(aggregator, calls)
    calls.append(step_call(CLIENTS, 1))
    answers_are_right(aggregator, calls)
    (join,) = federation.events("join")
    assert (join["identity"], join["worker"], join["clients"]) == ("x", "w", 3)
    assert [word in join["credential"] for word in ("certificate", "token")] == [by != "token", by != "certificate"]
    federation.stop()
    events = [event["event"] for event in federation.events() if event["event"] != "settings"]  # a token was made
    assert events == ["join", "leave"]


# ---- permissions by role


def call_join(channel, metadata, clients=("a-1",)):
    answers = channel.stream_stream(f"/{stream.SERVICE}/{stream.METHOD}")(
        iter([stand_in(clients)]), metadata=metadata, timeout=60
    )
    first, *_ = answers  # to the end: what is sent after the Welcome is counted before the next test
    return first


def stand_in(clients) -> bytes:
    """Return a Hello as a worker would send it."""
    from transport_support import ALGORITHMS

    hello = wire.Hello(
        protocol=PROTOCOL, package=fedloom.__version__, worker="w", incarnation="i", clients=clients,
        algorithms=ALGORITHMS,
    )  # fmt: skip
    return seal_frame(serialize(wire.WorkerPart(hello=hello)))


def call_watch(channel, metadata):
    return next(channel.unary_stream(f"/{control.CONTROL}/{control.WATCH}")(b"", metadata=metadata, timeout=10))


def call_health(channel, metadata):
    request = health_pb2.HealthCheckRequest(service=stream.SERVICE)
    return health_pb2_grpc.HealthStub(channel).Check(request, metadata=metadata, timeout=10)


def call_reflection(channel, metadata):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    return next(reflection(iter([request]), metadata=metadata, timeout=10))


def controlling(name: str, request) -> Callable:
    kind = "unary_stream" if name == "Clients" else "unary_unary"

    def call(channel, metadata):
        method = getattr(channel, kind)(f"/{control.CONTROL}/{name}")
        answer = method(request.SerializeToString(), metadata=metadata, timeout=10)
        return list(answer) if name == "Clients" else answer

    return call


CONTROLLED = {
    "Status": control_pb2.StatusRequest(),
    "Clients": control_pb2.ClientsRequest(),
    "Pause": control_pb2.PauseRequest(),
    "Resume": control_pb2.ResumeRequest(),
    "Stop": control_pb2.StopRequest(),
}


def call_describe(channel, metadata):
    method = channel.unary_unary(f"/{stream.MODELS}/{stream.DESCRIBE}")
    return models.Described.FromString(method(b"", metadata=metadata, timeout=10)) is not None


def call_personalize(channel, metadata):
    ask = models.NewcomerPart(ask=models.Ask(client="a 1", package=fedloom.__version__))
    method = channel.stream_stream(f"/{stream.MODELS}/{stream.PERSONALIZE}")
    try:
        return next(method(iter([seal_frame(serialize(ask))]), metadata=metadata, timeout=10))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:  # the call was permitted, and its request checked
            return error
        raise


CALLS = {
    "Join": call_join,
    "Watch": call_watch,
    "Health": call_health,
    "Reflection": call_reflection,
    **{name: controlling(name, request) for name, request in CONTROLLED.items()},
    "Describe": call_describe,
    "Personalize": call_personalize,
}
MAY = {
    **{(call, role): False for call in CALLS for role in (*Role, None)},
    **{("Health", role): True for role in (*Role, None)},
    ("Join", "worker"): True,
    ("Join", "observer"): True,
    ("Watch", "watch"): True,
    ("Watch", "admin"): True,
    **{(call, role): True for call in ("Status", "Clients") for role in ("watch", "admin")},
    **{(call, "admin"): True for call in ("Pause", "Resume", "Stop")},
    **{(call, "personalize"): True for call in ("Describe", "Personalize")},
}
"""The table of docs/security.md; role None is nobody."""


@pytest.fixture(scope="module")
def by_role(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Federation, ProgressPublisher, dict]]:
    federation = Federation(tmp_path_factory.mktemp("roles"))
    tokens = {role: add_token(federation.tokens, role)[0].get_secret_value() for role in Role}
    asked: list[bool] = []
    monitor = Monitor("run-1", "toy", 1)
    notices = ProgressPublisher(monitor)
    monitor.know([ClientEntry("a-1", True, 1, 1, 1, {}, "")])
    about = {"monitor": monitor, "control": Control(monitor, asked.append)}
    about["models"] = Personalization(lambda digest: None, lazy=True)
    aggregator = federation.start(BY_ROLE, mutual=False, tokens=True, notices=notices, roster=["a-2"], **about)
    aggregator.asked = lambda: (about["control"].paused, len(asked))
    yield federation, notices, tokens
    federation.stop()


def dialled(federation: Federation):
    trusted = grpc.ssl_channel_credentials((federation.ca / "ca.crt").read_bytes())
    return grpc.secure_channel(federation.address, trusted, options=[("grpc.use_local_subchannel_pool", 1)])


def test_the_documented_permission_table_matches_tests_and_interceptor() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    _, _, rest = page.partition("| call | ")
    head, _, *rows = rest.partition("\n\n")[0].splitlines()
    roles = [None if name == "nobody" else name.strip("`") for name in head.strip(" |").split(" | ")]
    assert set(roles) == {*Role, None}
    known = [*gate.ACTIONS, f"{gate.HEALTH}Health", "/grpc.reflection.v1alpha.ServerReflection/Reflection"]
    found = dict.fromkeys(known, dict.fromkeys(roles, False))  # anything else is for no role
    for row in rows:
        calls, *cells = row.strip()[1:-1].split("|")
        may = {role: bool(cell.strip()) for role, cell in zip(roles, cells, strict=True)}
        service, _, first = "", "", ""
        for name in re.findall("`([^`]+)`", calls):
            service, _, first = name.partition("/") if "." in name else (service, "", name)
            meant = [call for call in known if call == f"/{service}/{first}" or (not first and f"/{service}/" in call)]
            assert meant, name
            found |= dict.fromkeys(meant, may)
    assert {call.rpartition("/")[2] for call in known} == set(CALLS)
    for call, may in found.items():
        assert may == {role: MAY[call.rpartition("/")[2], role] for role in roles}, call


@pytest.mark.parametrize(("call", "role"), MAY)
def test_each_role_may_make_the_documented_calls(by_role, call: str, role: str | None) -> None:
    federation, notices, tokens = by_role
    (aggregator,) = federation.running
    metadata = () if role is None else (("authorization", f"Bearer {tokens[role]}"),)
    until(lambda: not aggregator.workers() and notices._watchers == 0)
    before = aggregator.workers(), notices._watchers, aggregator.traffic, len(federation.events("join"))
    before += (aggregator.asked(), len(federation.events("control")))
    with dialled(federation) as channel:
        if MAY[call, role]:
            assert CALLS[call](channel, metadata)
            return
        with pytest.raises(grpc.RpcError) as refused:
            CALLS[call](channel, metadata)
    codes = {grpc.StatusCode.UNAUTHENTICATED if role is None else grpc.StatusCode.PERMISSION_DENIED}
    assert refused.value.code() in (codes if call != "Reflection" else {grpc.StatusCode.UNIMPLEMENTED})
    after = aggregator.workers(), notices._watchers, aggregator.traffic, len(federation.events("join"))
    after += (aggregator.asked(), len(federation.events("control")))
    assert after == before, "what was refused has changed something"


@pytest.mark.parametrize(
    ("role", "clients", "facts"),
    [
        ("worker", ("a-1", "b-1"), ("worker", "b-1")),
        ("worker", ("b-1", "b-2", "b-3", "b-4", "b-5"), ("b-1, b-2, b-3", "2 more")),
        ("observer", ("b-1",), ("observer", "b-1")),
        ("observer", ("a-1", "a-2"), ("observer", "a-2")),
        ("worker", ("a-1\x1b[31m/../x",), ("worker", "a-1")),
    ],
)
def test_clients_of_other_identities_cannot_be_announced(by_role, role: str, clients: tuple[str, ...], facts) -> None:
    federation, _, tokens = by_role
    (aggregator,) = federation.running
    until(lambda: not aggregator.workers())
    joins = len(federation.events("join"))
    with dialled(federation) as channel, pytest.raises(grpc.RpcError) as refused:
        call_join(channel, (("authorization", f"Bearer {tokens[role]}"),), clients)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert tells(refused.value.details(), *facts)
    assert "\x1b" not in refused.value.details()
    assert aggregator.workers() == ()
    assert len(federation.events("join")) == joins


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", "Bearer "),),
        (("authorization", "Bearer fedloom_000000000000_" + "A" * 43),),
        (("authorization", "Basic {worker}"),),
        (("authorization", "{worker}"),),
        (("authorization", "bearer {worker}"),),
        (("authorization", "Bearer {worker} "),),
        (("authorization", "Bearer {worker}"), ("authorization", "Bearer {worker}")),
        (("authorization", "Bearer {worker}"), ("authorization", "Bearer {admin}")),
        (("x-token", "{worker}"),),
    ],
)
def test_almost_equal_tokens_are_rejected(by_role, metadata) -> None:
    federation, _, tokens = by_role
    sent = tuple((key, value.format(**tokens)) for key, value in metadata)
    with dialled(federation) as channel, pytest.raises(grpc.RpcError) as refused:
        call_join(channel, sent)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert federation.running[0].workers() == ()


@pytest.mark.parametrize("sent", [b"\xff" * 9, b"", None])
def test_data_from_strangers_are_neither_parsed_nor_awaited(
    federation: Federation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sent: bytes | None
) -> None:
    monkeypatch.setattr(audit, "REPEATED_S", 0.0)  # each rejection has its line
    monitor = Monitor()
    about = {
        "notices": ProgressPublisher(Monitor("run-1", "toy", 1)),
        "monitor": monitor,
        "control": Control(monitor, list),
    }
    about["models"] = Personalization(lambda digest: None, lazy=True)
    federation.start(BY_ROLE, mutual=False, tokens=True, **about)
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        if sent is not None:
            yield sent
        over.wait(20)  # the caller's side stays open: waiting for its end, or for a message, would delay the answer

    with dialled(federation) as channel:
        for call in gate.ACTIONS:
            with pytest.raises(grpc.RpcError) as refused:
                next(channel.stream_stream(call)(messages(), timeout=10))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, call
        over.set()
    assert [event["call"] for event in federation.events("refused")] == list(gate.ACTIONS)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("sent", [[b"\xff" * 9], []])
def test_an_unreadable_request_from_a_known_identity(
    by_role, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sent: list[bytes]
) -> None:
    monkeypatch.setattr(audit, "REPEATED_S", 0.0)
    federation, _, tokens = by_role
    before = len(federation.events("refused"))
    metadata = (("authorization", f"Bearer {tokens['admin']}"),)
    with dialled(federation) as channel:
        for call in CONTROLLED:
            with pytest.raises(grpc.RpcError) as refused:
                next(channel.stream_stream(f"/{control.CONTROL}/{call}")(iter(sent), metadata=metadata, timeout=10))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, call
    reported = federation.events("refused")[before:]
    assert [(line["kind"], line["identity"]) for line in reported] == len(CONTROLLED) * [("request", "admin")]
    assert not [record for record in caplog.records if record.exc_info]


def test_an_unknown_call(by_role) -> None:
    federation, _, tokens = by_role
    metadata = (("authorization", f"Bearer {tokens['admin']}"),)
    with dialled(federation) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/fedloom.v1.Federation/Leave")(b"", metadata=metadata, timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_an_identity_that_calls_too_often_is_throttled_alone(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CALLS", (5, 0.0))
    aggregator = federation.start(
        BY_ROLE, mutual=False, tokens=True, notices=ProgressPublisher(Monitor("run-1", "toy", 1))
    )
    token, _ = add_token(federation.tokens, "watch")
    codes = []
    with dialled(federation) as channel:
        for _ in range(8):
            try:
                call_watch(channel, (("authorization", f"Bearer {token.get_secret_value()}"),))
            except grpc.RpcError as error:
                codes.append(error.code())
    assert codes == 3 * [grpc.StatusCode.RESOURCE_EXHAUSTED]
    federation.worker(federation.member(None, token="worker"), clients=["a-1"])
    aggregator.wait_for(["a-1"], 10)
    assert [event["kind"] for event in federation.events("refused")] == ["rate"]


# ---- names


def test_only_the_same_identity_can_replace_a_worker(federation: Federation) -> None:
    aggregator = federation.start()
    federation.worker(federation.member("north"), name="shared")
    aggregator.wait_for(CLIENTS, 10)
    thief = federation.worker(federation.member("south"), name="shared", clients=["b-1"])
    error = ended(thief)
    assert error.exit_code == ExitCode.REFUSED
    assert tells(str(error), "south", "shared", "another identity")
    assert [set(worker.clients) for worker in aggregator.workers()] == [set(CLIENTS)]
    assert [event["kind"] for event in federation.events("refused")] == ["name"]
    federation.worker(federation.member("north"), name="shared", incarnation="second")
    until(lambda: [worker.incarnation for worker in aggregator.workers()] == ["second"], 10)
    answers_are_right(aggregator, [start_call(CLIENTS)])


# ---- lifetime of a stream


def test_a_stream_past_its_lifetime_reconnects_without_repeated_computation(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LONGEST_S", 0.4)
    aggregator = federation.start()
    worker = federation.worker(federation.member("north"))
    aggregator.wait_for(CLIENTS, 10)
    calls = [start_call(CLIENTS)]
    answers_are_right(aggregator, calls)
    for i in range(1, 4):
        joins = len(federation.events("join"))
        until(lambda joins=joins: len(federation.events("join")) > joins, 10)
        calls.append(step_call(CLIENTS, i))
        answers_are_right(aggregator, calls)
    assert worker.session.computed == len(calls) * len(CLIENTS)
    assert len(worker.sessions) == 1
    assert federation.events("revoked") == []


def test_a_connection_has_a_maximum_age(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the life of a connection, so that a caller is verified again after a change of the CA."""
    monkeypatch.setattr(gate, "LONGEST_S", 0.3)
    federation.start(BY_ROLE, mutual=False, tokens=True, notices=ProgressPublisher(Monitor("run-1", "toy", 1)))
    token, _ = add_token(federation.tokens, "watch")
    proxy = Proxy(federation.address)
    federation.address = proxy.address
    metadata = (("authorization", f"Bearer {token.get_secret_value()}"),)
    with dialled(federation) as channel:

        def another_connection() -> bool:
            call_watch(channel, metadata)
            return len(proxy.open) > 2  # two sockets each

        until(another_connection, 20)
    proxy.close()


def test_a_revoked_member_is_disconnected_within_seconds_and_others_continue(federation: Federation) -> None:
    aggregator = federation.start()
    first = federation.worker(federation.member("north"), name="first")
    aggregator.wait_for(CLIENTS, 10)
    calls = [start_call(CLIENTS)]
    answers_are_right(aggregator, calls)
    text = TABLE.replace("urn:fedloom:north", "urn:fedloom:gone").replace("urn:fedloom:south", "urn:fedloom:second")
    federation.table.write_text(text.replace('"b-*"', '"*"'))
    error = ended(first)
    assert error.exit_code == ExitCode.REFUSED
    assert tells(str(error), "no identity", "urn:fedloom:north")
    federation.worker(federation.member("second"), name="second")
    calls.append(step_call(CLIENTS, 1))
    answers_are_right(aggregator, calls)
    assert [event["identity"] for event in federation.events("revoked")] == ["north"]
    assert {event["event"] for event in federation.events()} == {"join", "leave", "revoked", "refused", "settings"}
    again = federation.worker(federation.member("north"), name="first")
    assert ended(again).exit_code == ExitCode.REFUSED


def test_a_token_is_rotated_without_interruption_and_its_revocation_ends_the_stream(federation: Federation) -> None:
    text = 'version: 1\nidentities:\n  - {name: x, token: x, roles: [worker], clients: ["*"]}\n'
    aggregator = federation.start(text, mutual=False, tokens=True)
    worker = federation.worker(federation.member(None, token="x"))
    aggregator.wait_for(CLIENTS, 10)
    calls = [start_call(CLIENTS)]
    answers_are_right(aggregator, calls)
    (old,) = [event["credential"].split()[1] for event in federation.events("join")]
    new, entry = add_token(federation.tokens, "x")
    (federation.folder / "x.token").write_text(new.get_secret_value())
    until(lambda: f"token {entry.id}" in [event["credential"] for event in federation.events("join")], 10)
    revoke_tokens(federation.tokens, old)
    calls.append(step_call(CLIENTS, 1))
    answers_are_right(aggregator, calls)
    assert worker.session.computed == 2 * len(CLIENTS)
    revoke_tokens(federation.tokens, entry.id)
    error = ended(worker)
    assert error.exit_code == ExitCode.REFUSED
    assert tells(str(error), entry.id, "x", "revoked at")


X = 'version: 1\nidentities:\n  - {name: x, token: x, roles: [worker], clients: ["*"]}\n'


@pytest.mark.parametrize("first", ["the member's", "the aggregator's", "the tokens"])
def test_credential_files_updated_one_after_the_other_end_no_worker(federation: Federation, first: str) -> None:
    """Refresh token and identity file one after the other, as Kubernetes does; in between the token is unknown."""
    aggregator = federation.start(X, mutual=False, tokens=True)
    worker = federation.worker(federation.member(None, token="x"), reconnect_s=60)
    aggregator.wait_for(CLIENTS, 10)
    calls = [start_call(CLIENTS)]
    answers_are_right(aggregator, calls)
    others = federation.folder / "tokens-after.json"  # without the old token
    new, entry = add_token(others, "x" if first != "the tokens" else "y")
    steps = {
        "member": lambda: replace(federation.folder / "x.token", new.get_secret_value()),
        "tokens": lambda: replace(federation.tokens, others.read_text()),
        "table": lambda: replace(federation.table, X.replace("token: x", "token: y")),
    }
    order = {"the member's": "member tokens", "the aggregator's": "tokens member", "the tokens": "tokens member table"}
    refused = len(federation.events("refused"))
    for step in order[first].split():
        steps[step]()
        until(lambda: len(federation.events("refused")) > refused or not aggregator.workers(), 10)
        time.sleep(0.5)
        assert worker.error is None
    until(lambda: f"token {entry.id}" in [event["credential"] for event in federation.events("join")], 20)
    aggregator.wait_for(CLIENTS, 20)
    calls.append(step_call(CLIENTS, 1))
    answers_are_right(aggregator, calls)
    assert worker.session.computed == 2 * len(CLIENTS)


def test_an_unknown_token_ends_a_worker_after_reconnect_s_and_a_revoked_one_at_once(
    federation: Federation,
) -> None:
    aggregator = federation.start(X, mutual=False, tokens=True)
    forgotten = federation.worker(federation.member(None, token="x"), reconnect_s=2)
    aggregator.wait_for(CLIENTS, 10)
    add_token(federation.folder / "others.json", "x")
    began = time.monotonic()
    replace(federation.tokens, (federation.folder / "others.json").read_text())
    assert ended(forgotten).exit_code == ExitCode.REFUSED
    assert time.monotonic() - began >= 2
    until(lambda: not aggregator.workers())
    revoked = federation.worker(federation.member(None, token="x"), reconnect_s=60)
    aggregator.wait_for(CLIENTS, 10)
    revoke_tokens(federation.tokens, "x")
    assert ended(revoked).exit_code == ExitCode.REFUSED
    stranger = Credentials(ClientOptions(ca=federation.ca / "ca.crt", token=make_token()))
    assert ended(federation.worker(stranger, name="stranger", reconnect_s=60)).exit_code == ExitCode.REFUSED


def test_a_launcher_resumes_watching_once_its_token_is_valid_again(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aggregator without watchers ends (``cluster.orphan_after_s``)."""
    table = "version: 1\nidentities:\n  - {name: x, token: x, roles: [watch]}\n"
    federation.start(table, mutual=False, tokens=True, notices=ProgressPublisher(Monitor("run-1", "toy", 1)))
    federation.member(None, token="x")
    known = federation.tokens.read_text()
    monkeypatch.setenv(FILES["ca"], str(federation.ca / "ca.crt"))
    monkeypatch.setenv(FILES["token_file"], str(federation.folder / "x.token"))
    add_token(federation.folder / "others.json", "y")
    output: list[str] = []
    launcher = ProgressClient(federation.address, output.append)
    with launcher.following():
        until(lambda: launcher.latest is not None)
        replace(federation.tokens, (federation.folder / "others.json").read_text())
        until(lambda: len(federation.events("refused")) > 1)
        launcher.latest = None
        replace(federation.tokens, known)
        until(lambda: launcher.latest is not None)
    id = token_id(SecretStr((federation.folder / "x.token").read_text()))
    assert len([line for line in output if id in line]) == 2, (
        output
    )  # when it was disconnected, and when it reconnected


def test_a_revoked_member_is_disconnected_even_after_another_rejection(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected call reads the files; the review of streams must still see that they have changed."""
    monkeypatch.setattr(gate, "CHECK_S", 0.5)
    aggregator = federation.start(None, mutual=False, tokens=True)
    credentials = federation.member(None, token="x")
    first = federation.worker(credentials)
    aggregator.wait_for(CLIENTS, 10)
    stranger = Credentials(ClientOptions(ca=federation.ca / "ca.crt", token=make_token()))
    revoke_tokens(federation.tokens, "x")
    assert ended(federation.worker(stranger, name="stranger")).exit_code == ExitCode.REFUSED
    assert tells(str(ended(first)), "x", "revoked at")


def test_a_stream_ends_when_its_certificate_expires(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    aggregator = federation.start()
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_now", lambda: datetime.now(UTC) - timedelta(hours=23, minutes=59, seconds=55))
        credentials = federation.member("north", days=1)
    worker = federation.worker(credentials, reconnect_s=0.5)
    aggregator.wait_for(CLIENTS, 10)
    error = ended(worker)
    assert error.exit_code == ExitCode.REFUSED
    assert tells(str(error), "north/tls.crt", "expired at", "clock")
    until(lambda: aggregator.workers() == ())
    assert federation.events("revoked") == []


def test_expiry_of_the_servers_certificate_is_announced_once(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CERTIFICATE_S", 0.01)
    looked: list[None] = []
    refresh = ReloadingFile.refresh
    monkeypatch.setattr(ReloadingFile, "refresh", lambda self: (looked.append(None), refresh(self))[1])

    def looks() -> None:
        """Wait for a few more file checks."""
        least = len(looked) + 5
        until(lambda: len(looked) > least)

    made = make_certificate("server", federation.folder, federation.ca, hosts=["127.0.0.1"], days=2, replace=True)
    output: list[str] = []
    federation.start(say=output.append)
    looks()
    assert output == []
    monkeypatch.setattr(gate, "datetime", type("later", (), {"now": lambda zone: made.ends - timedelta(hours=1)}))
    until(lambda: output)
    looks()
    assert len(output) == 1
    assert tells(output[0], "certificate", f"{made.ends:%Y-%m-%d %H:%M:%S}")
    make_certificate("server", federation.folder, federation.ca, hosts=["127.0.0.1"], days=30, replace=True)
    looks()
    assert len(output) == 1


def test_a_damaged_identity_file_disconnects_nobody(federation: Federation, caplog: pytest.LogCaptureFixture) -> None:
    aggregator = federation.start()
    federation.worker(federation.member("north"))
    aggregator.wait_for(CLIENTS, 10)
    with caplog.at_level(logging.WARNING, "fedloom.security"):
        federation.table.write_text("version: 1\nidentities: nobody\n")
        until(lambda: any("in force" in record.getMessage() for record in caplog.records))
    answers_are_right(aggregator, [start_call(CLIENTS)])
    federation.worker(federation.member("south"), name="later", clients=["b-1"])
    until(lambda: len(aggregator.workers()) == 2, 10)


def test_certificates_and_authorities_are_rotated_during_a_conversation(federation: Federation) -> None:
    """First every peer gets both authorities, then the new certificates, and then the old authority is removed."""
    aggregator = federation.start()
    credentials = federation.member("north")
    worker = federation.worker(credentials)
    aggregator.wait_for(CLIENTS, 10)
    calls = [start_call(CLIENTS)]
    answers_are_right(aggregator, calls)
    for turn in range(2):
        joins = len(federation.events("join"))
        following = federation.folder / f"ca-{turn}"
        make_ca(following)
        old, new = (federation.ca / "ca.crt").read_text(), (following / "ca.crt").read_text()
        replace(federation.ca / "ca.crt", old + new)
        until(lambda joins=joins: len(federation.events("join")) == joins + 1, 10)
        make_certificate("server", federation.folder, following, hosts=["127.0.0.1"], replace=True)
        federation.member("north", ca=following)
        until(lambda joins=joins: len(federation.events("join")) > joins + 1, 10)
        replace(federation.ca / "ca.crt", new)
        calls.append(step_call(CLIENTS, len(calls)))
        answers_are_right(aggregator, calls)
    fingerprints = {event["credential"] for event in federation.events("join")}
    assert len(fingerprints) == 3, "not every certificate was shown"
    assert worker.session.computed == len(calls) * len(CLIENTS)
    make_ca(federation.folder / "stranger")
    certificate, key = pair(federation, "north", federation.folder / "ca-0")
    other = Credentials(ClientOptions(ca=federation.ca / "ca.crt", certificate=certificate, key=key))
    assert isinstance(ended(federation.worker(other, name="late", reconnect_s=0.5)), RefusedError)


def replace(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}")
    staged.write_text(text)
    staged.replace(path)


def pair(federation: Federation, name: str, ca: Path) -> tuple[Path, Path]:
    made = make_certificate(name, federation.folder / "old", ca, replace=True)
    return made.certificate, made.key


def test_tls_connections_cut_every_few_kilobytes_lose_no_client(federation: Federation) -> None:
    """Also during handshakes: the cut is not taken for an untrusted aggregator."""
    aggregator = federation.start()
    proxies = [Proxy(federation.address, cut_after=30_000, seed=seed) for seed in range(2)]
    for i, proxy in enumerate(proxies):
        federation.address = proxy.address
        federation.worker(federation.member("north"), name=f"w{i}", reconnect_s=60)
    aggregator.wait_for(CLIENTS, 20)
    calls = [start_call(CLIENTS, deadline_s=60, d=1_000)]
    answers_are_right(aggregator, calls)
    for exchange in range(1, 12):
        calls.append(step_call(CLIENTS, exchange, deadline_s=60, d=1_000))
        answers_are_right(aggregator, calls)
    assert all(proxy.cuts > 3 for proxy in proxies)
    for proxy in proxies:
        proxy.close()


# ---- untrusted peers


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Create certificates as of so many days from now."""

    def at(days: float) -> None:
        monkeypatch.setattr(certificates, "_now", lambda: datetime.now(UTC) + timedelta(days=days))

    return at


def test_a_server_with_an_expired_certificate_does_not_start(federation: Federation, at) -> None:
    at(-20)
    make_ca(federation.folder / "old")
    make_certificate("server", federation.folder, federation.ca, hosts=["127.0.0.1"], days=10, replace=True)
    with pytest.raises(RefusedError) as refused:
        federation.start()
    assert tells(str(refused.value), "server/tls.crt", "expired at", "clock")


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("ended", ("its certificate has expired", "this machine's clock", "UTC")),
        ("not yet", ("its certificate is not valid yet", "this machine's clock", "UTC")),
        ("authority", ("its certificate is not", "ca.crt")),
        ("host", ("its certificate is not for 127.0.0.1",)),
    ],
)
@pytest.mark.parametrize("who", ["worker", "watcher"])
def test_a_server_with_an_untrusted_certificate_is_rejected(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, what: str, facts: tuple[str, ...], who: str
) -> None:
    hosts = ["elsewhere.example"] if what == "host" else ["127.0.0.1"]
    with monkeypatch.context() as patch:
        days = {"ended": -20, "not yet": 20}.get(what, 0)
        patch.setattr(certificates, "_now", lambda: datetime.now(UTC) + timedelta(days=days))
        make_certificate("server", federation.folder, federation.ca, hosts=hosts, days=10, replace=True)
    if days:  # the server's own clock is shifted
        real = certificates.read_key_pair.__globals__["datetime"]
        shifted = type("shifted", (datetime,), {"now": classmethod(lambda cls, zone: real.now(zone) + timedelta(days))})
        with monkeypatch.context() as patch:
            patch.setitem(certificates.read_key_pair.__globals__, "datetime", shifted)
            federation.start()
    else:
        federation.start()
    credentials = federation.member("north")
    if what == "authority":
        make_ca(federation.folder / "stranger")
        trusted = federation.folder / "stranger" / "ca.crt"
        credentials = Credentials(
            ClientOptions(
                ca=trusted, certificate=federation.folder / "north/tls.crt", key=federation.folder / "north/tls.key"
            )
        )
    if who == "worker":
        error = ended(federation.worker(credentials, reconnect_s=60))  # without delay, nevertheless
    else:
        with pytest.raises(FedloomError) as raised:
            next(follow(federation.address, connect_s=0.5, credentials=credentials))
        error = raised.value
    assert error.exit_code == ExitCode.REFUSED
    assert tells(str(error), federation.address, *facts)


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("none", ("may require a certificate", "tls.crt")),
        ("authority", ("urn:fedloom:north", "CA")),
    ],
)
def test_a_member_with_an_untrusted_certificate_is_rejected(
    federation: Federation, what: str, facts: tuple[str, ...]
) -> None:
    aggregator = federation.start()
    if what == "authority":
        make_ca(federation.folder / "stranger")
    credentials = federation.member(
        None if what == "none" else "north", ca=federation.folder / "stranger" if what == "authority" else None
    )
    error = ended(federation.worker(credentials, reconnect_s=0.5))
    assert error.exit_code == ExitCode.REFUSED
    assert tells(str(error), federation.address, *facts)
    assert aggregator.workers() == ()
    with pytest.raises(RefusedError) as refused:
        next(follow(federation.address, connect_s=0.5, credentials=credentials))
    assert tells(str(refused.value), federation.address, *facts)


@pytest.mark.parametrize(("days", "word"), [(-20, "expired at"), (20, "is not valid before")])
def test_a_member_with_an_invalid_certificate_fails_before_connecting(
    federation: Federation, at, days: float, word: str
) -> None:
    at(days)
    with pytest.raises(RefusedError) as refused:
        federation.member("north", days=10)
    assert tells(str(refused.value), "north/tls.crt", word, "clock")


def test_plaintext_and_tls_peers_report_the_mismatch(federation: Federation) -> None:
    federation.start()
    plain = federation.worker(None, name="plain", reconnect_s=0.5)
    asked: list[FedloomError] = [ended(plain)]
    with pytest.raises(AbandonedError) as raised, control.dialled(federation.address) as client:
        client.status()
    asked.append(raised.value)

    async def describe() -> None:
        await Models(federation.address).describe(0.5)

    with pytest.raises(QuorumError) as without:
        asyncio.run(describe())
    asked.append(without.value)
    assert [type(error) for error in asked] == [AbandonedError, AbandonedError, QuorumError]
    assert all(tells(str(error), federation.address, "ca.crt") for error in asked)
    aggregator = make_aggregator()
    federation.running.append(aggregator)
    federation.address = aggregator.start("127.0.0.1:0")
    error = ended(federation.worker(federation.member("north"), reconnect_s=60))
    assert error.exit_code == ExitCode.REFUSED
    assert tells(str(error), federation.address, "does not use TLS")


def test_a_worker_ends_when_its_aggregator_stops_over_tls(federation: Federation) -> None:
    aggregator = federation.start()
    worker = federation.worker(federation.member("north"), reconnect_s=0.5)
    aggregator.wait_for(CLIENTS, 10)
    aggregator.stop()
    assert isinstance(ended(worker), AbandonedError)


# ---- without TLS


def test_a_plaintext_token_is_sent_only_to_this_machine() -> None:
    token = make_token()
    for host in ("localhost", "127.0.0.1", "[::1]", "127.8.9.1"):
        assert Credentials(ClientOptions(token=token)).show(host).token == token
    for host in ("10.0.0.1", "example.org", "localhost.example.org", "[2001:db8::1]", "0.0.0.0"):
        with pytest.raises(ExperimentError) as error:
            Credentials(ClientOptions(token=token)).show(host)
        assert tells(str(error.value), host, "plaintext", "ca.crt", "insecure")
        assert Credentials(ClientOptions(token=token, insecure=True)).show(host).token == token
        assert Credentials(ClientOptions()).show(host).token is None


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_an_unprotected_aggregator_listens_only_on_this_machine(federation: Federation, listen: str) -> None:
    token = make_token()
    pair = (federation.folder / "server/tls.crt", federation.folder / "server/tls.key")
    for options, missing in (
        (ServerOptions(), ("tls.crt", "tokens.json")),
        (ServerOptions(token=token), ("tls.crt",)),
        (ServerOptions(certificate=pair[0], key=pair[1]), ("ca.crt, tokens.json",)),
    ):
        with pytest.raises(ExperimentError) as error:
            make_aggregator(protection=Protection(options)).start(listen)
        assert tells(str(error.value), "listen", listen.rpartition(":")[0], *missing, "insecure")
    for options in (ServerOptions(insecure=True), ServerOptions(certificate=pair[0], key=pair[1], token=token)):
        aggregator = make_aggregator(protection=Protection(options))
        federation.running.append(aggregator)
        try:
            assert aggregator.start(listen)
        except ExperimentError as error:
            assert "[::]" in listen and "not of this machine" in str(error)  # noqa: PT017, PT018 - no IPv6 here


def test_a_shared_token_in_plaintext(federation: Federation) -> None:
    token = make_token()
    aggregator = make_aggregator(protection=Protection(ServerOptions(token=token)), audit=Audit(federation.audit))
    federation.running.append(aggregator)
    federation.address = aggregator.start("127.0.0.1:0")
    federation.worker(Credentials(ClientOptions(token=token)))
    aggregator.wait_for(CLIENTS, 10)
    answers_are_right(aggregator, [start_call(CLIENTS)])
    for options in (ClientOptions(), ClientOptions(token=make_token())):
        error = ended(federation.worker(Credentials(options), name="stranger"))
        assert error.exit_code == ExitCode.REFUSED
    assert len(aggregator.workers()) == 1


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (ServerOptions(certificate=Path("a")), ("tls.crt", "tls.key")),
        (ServerOptions(key=Path("a")), ("tls.crt", "tls.key")),
        (ServerOptions(ca=Path("a")), ("ca.crt", "tls.crt")),
        (ServerOptions(identities=Path("a")), ("identities.yaml", "ca.crt", "tokens.json")),
        (ClientOptions(certificate=Path("a")), ("tls.crt", "tls.key")),
        (ClientOptions(certificate=Path("a"), key=Path("b")), ("tls.crt", "ca.crt")),
        (ClientOptions(token_file=Path("a"), token=make_token()), ("FEDLOOM_TOKEN_FILE", "FEDLOOM_TOKEN")),
    ],
)
def test_conflicting_options(options: ServerOptions | ClientOptions, facts: tuple[str, ...]) -> None:
    with pytest.raises(ExperimentError) as error:
        Protection(options) if isinstance(options, ServerOptions) else Credentials(options)
    assert tells(str(error.value), *facts)


def test_nobody_is_admitted_while_the_audit_log_cannot_be_written(federation: Federation) -> None:
    federation.audit = federation.folder / "absent" / "audit.jsonl"
    aggregator = federation.start()
    worker = federation.worker(federation.member("north"), reconnect_s=60)
    until(lambda: aggregator.traffic.up > 0, 10)
    assert aggregator.workers() == ()
    federation.audit.parent.mkdir()
    aggregator.wait_for(CLIENTS, 20)
    assert worker.error is None
    assert len(federation.events("join")) == 1


# ---- secrets are never shown


def test_no_secret_is_written_anywhere(federation: Federation, caplog: pytest.LogCaptureFixture) -> None:
    text = 'version: 1\nidentities:\n  - {name: x, token: x, roles: [worker], clients: ["a-*"]}\n'
    with caplog.at_level(logging.DEBUG):
        aggregator = federation.start(text, mutual=False, tokens=True)
        right = federation.member(None, token="x")
        stranger = federation.folder / "stranger.token"
        stranger.write_text(make_token().get_secret_value())
        errors = [
            ended(federation.worker(Credentials(ClientOptions(ca=federation.ca / "ca.crt", token_file=stranger)))),
            ended(federation.worker(right, name="x", clients=["b-1"])),
        ]
        worker = federation.worker(right, name="x", clients=["a-1"])
        aggregator.wait_for(["a-1"], 10)
        revoke_tokens(federation.tokens, "x")
        errors.append(ended(worker))
    secrets = [path.read_text().strip() for path in federation.folder.glob("*.token")]
    secrets += [secret.split("_", 2)[2] for secret in secrets]  # the secret part may contain a _, too
    secrets += [line for path in federation.folder.rglob("*.key") for line in path.read_text().splitlines()[1:-1]]
    reported = [record.getMessage() for record in caplog.records] + [repr(record.__dict__) for record in caplog.records]
    reported += [str(error) + repr(error) + repr(error.__cause__) for error in errors]
    reported += [federation.audit.read_text(), federation.tokens.read_text(), repr(right.current), repr(right._options)]
    assert len(secrets) > 6
    assert len(federation.events()) >= 4
    for secret in secrets:
        assert not any(secret in text for text in reported)


def test_a_hostile_peer_with_an_identity_can_only_answer_for_its_own_clients(federation: Federation) -> None:
    """The peer knows the run and all rows, and claims to have the answer of a client of another member."""
    token = make_token()
    aggregator = make_aggregator(protection=Protection(ServerOptions(token=token)), audit=Audit(federation.audit))
    federation.running.append(aggregator)
    federation.address = aggregator.start("127.0.0.1:0")
    honest = federation.worker(Credentials(ClientOptions(token=token)), name="honest", clients=["a-1"])
    aggregator.wait_for(["a-1"], 10)
    hostile = Hostile(
        federation.address, clients=["b-1"], metadata=(("authorization", f"Bearer {token.get_secret_value()}"),)
    )
    hostile.join()
    aggregator.wait_for(["a-1", "b-1"], 10)
    from transport_support import Sum

    answers: list = []
    call = start_call(["a-1", "b-1"])
    thread = threading.Thread(target=lambda: answers.extend(aggregator.exchange(call)))
    thread.start()
    request = hostile.request()
    poison = Sum(torch.full((1, call.message.x.shape[1]), 7.0))
    hostile.send(hostile.transfer(request, poison, rows=[0], clients=["a-1"]))
    hostile.send(hostile.transfer(request, poison))
    thread.join(20)
    assert torch.equal(answers[0].x[0], expected([call], 0)[0])
    assert torch.equal(answers[1].x, poison.x)
    assert honest.session.computed == 1
    hostile.leave()
    assert encode(poison)


# ---- limits of a member


def announcing(federation: Federation, name: str, clients: list[str], token: str) -> Hostile:
    reported = wire.Announced(train=10, validation=2, test=3, labelled=True)
    return Hostile(
        federation.address,
        name,
        clients,
        metadata=((gate.TOKEN, f"Bearer {token}"),),
        credentials=grpc.ssl_channel_credentials((federation.ca / "ca.crt").read_bytes()),
        announced=[reported] * len(clients),
    )


def test_the_client_limit_of_an_identity_spans_its_workers(federation: Federation) -> None:
    table = 'version: 1\nidentities:\n  - {name: m, token: m, roles: [worker], clients: ["g-*"], max_clients: 5}\n'
    token = add_token(federation.tokens, "m")[0].get_secret_value()
    aggregator = federation.start(table, mutual=False, tokens=True, presence=AvailableClients(), classes=2, clients=())
    joined = [announcing(federation, "first", ["g-1", "g-2", "g-3"], token)]
    assert joined[0].join().WhichOneof("part") == "welcome"
    until(lambda: aggregator.workers())
    crowd = announcing(federation, "second", ["g-4", "g-5", "g-6"], token)
    with pytest.raises(grpc.RpcError) as refused:
        crowd.join()
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert tells(refused.value.details(), 5, 3, "max_clients")
    until(lambda: federation.events("refused"))
    joined.append(announcing(federation, "second", ["g-4", "g-5"], token))
    assert joined[1].join().WhichOneof("part") == "welcome"
    joined.append(announcing(federation, "first", ["g-1", "g-2", "g-6"], token))  # replaces its own older stream
    assert joined[2].join().WhichOneof("part") == "welcome"
    until(lambda: sorted(len(worker.clients) for worker in aggregator.workers()) == [2, 3])
    for each in (*joined, crowd):
        each.leave()


@pytest.mark.parametrize(
    "table", ['version: 1\nidentities:\n  - {name: m, token: m, roles: [worker], clients: ["*"]}\n', None]
)
def test_a_pattern_alone_does_not_allow_thousands_of_clients(federation: Federation, table: str | None) -> None:
    token = add_token(federation.tokens, "m")[0].get_secret_value()
    aggregator = federation.start(table, mutual=False, tokens=True, presence=AvailableClients(), classes=2, clients=())
    ghosts = announcing(federation, "ghosts", [f"g-{i}" for i in range(5_000)], token)
    with pytest.raises(grpc.RpcError) as refused:
        ghosts.join()
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert aggregator.workers() == ()
    ghosts.leave()


def test_an_identity_has_a_limited_number_of_watch_streams(
    by_role: tuple[Federation, ProgressPublisher, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "WATCHING", 3)
    federation, _, tokens = by_role
    metadata = ((gate.TOKEN, f"Bearer {tokens[Role.WATCH]}"),)
    method = f"/{control.CONTROL}/{control.WATCH}"
    with dialled(federation) as channel, dialled(federation) as other:
        held = [channel.unary_stream(method)(b"", metadata=metadata, timeout=20) for _ in range(3)]
        assert all(next(each) for each in held)
        with pytest.raises(grpc.RpcError) as refused:
            next(other.unary_stream(method)(b"", metadata=metadata, timeout=10))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        held[0].cancel()
        until(lambda: _watched(other, method, metadata))


def _watched(channel, method, metadata) -> bool:
    try:
        return bool(next(channel.unary_stream(method)(b"", metadata=metadata, timeout=10)))
    except grpc.RpcError:
        return False


def test_a_long_identity_file_is_read_in_the_background(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call after a change waits until the file is read; health checks and the rest of the event loop do not."""
    monkeypatch.setattr(gate, "CHECK_S", 3_600.0)
    token = add_token(federation.tokens, "last")[0].get_secret_value()
    federation.start(BY_ROLE, mutual=False, tokens=True, notices=ProgressPublisher(Monitor("run-1", "toy", 1)))
    reading, go_on = threading.Event(), threading.Event()

    def read_slowly(path: Path) -> Any:
        reading.set()
        assert go_on.wait(60.0)
        return read_identities(path)

    monkeypatch.setattr(access, "read_identities", read_slowly)
    replace(federation.table, federation.table.read_text() + "  - {name: last, token: last, roles: [watch]}\n")
    metadata = ((gate.TOKEN, f"Bearer {token}"),)
    with dialled(federation) as channel, dialled(federation) as other:
        watching = channel.unary_stream(f"/{control.CONTROL}/{control.WATCH}")(b"", metadata=metadata, timeout=60.0)
        assert reading.wait(60.0)
        call_health(other, ())  # answered while the file is being read
        go_on.set()
        assert next(watching)  # the newest file permits it
