"""Status and control of a federation over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transport_support import Worker, key, make_aggregator, start_call, until

from fedloom.data.manifest import ClientEntry
from fedloom.errors import AbandonedError, ExperimentError, RefusedError, StorageError
from fedloom.federation.activity import Group, LastEvaluation, RosterClient
from fedloom.federation.monitor import Control, Monitor, read_pause
from fedloom.runs.folder import RunFolder
from fedloom.security.audit import Audit
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.options import ClientOptions, Credentials, Protection, ServerOptions
from fedloom.security.tokens import add_token
from fedloom.transport import control_service
from fedloom.transport.control import ControlClient, dialled, from_wire
from fedloom.transport.control_service import OPERATOR
from fedloom.transport.wire import control_pb2

CLIENTS = ("anna", "bo", "carla")


def test_status_lists_connected_and_absent_clients() -> None:
    aggregator = make_aggregator()
    with pytest.raises(RuntimeError):
        aggregator.activity()
    address = aggregator.start("127.0.0.1:0")
    go_on = threading.Event()
    worker = Worker(address, "w1", CLIENTS)
    worker.before = lambda client, exchange: None if client == "anna" else go_on.wait(30) and None
    aggregator.wait_for(CLIENTS, 10)
    asking = threading.Thread(target=aggregator.exchange, args=(start_call(CLIENTS, 60.0),))
    asking.start()
    until(lambda: aggregator.activity().awaited == 2)  # anna has answered; bo is working, carla waits for her turn
    now = aggregator.activity()
    assert [(each.client, each.worker) for each in now.awaiting] == [("bo", "w1"), ("carla", "w1")]
    (reported,) = now.workers
    assert (reported.name, reported.identity, reported.clients) == ("w1", None, 3)
    assert reported.since <= now.time
    assert now.totals.bytes_down > 0
    go_on.set()
    asking.join(30)
    assert aggregator.activity().awaited == 0
    worker.leave()
    until(lambda: not aggregator.activity().workers)
    asking = threading.Thread(target=aggregator.exchange, args=(start_call(CLIENTS, 1.0, the_key=key(1)),))
    asking.start()
    until(lambda: aggregator.activity().late == 3)  # no worker serves them
    assert all(each.worker is None and each.deadline is not None for each in aggregator.activity().awaiting)
    asking.join(30)
    aggregator.stop()
    with pytest.raises(RuntimeError):
        aggregator.activity()


class Controlled:
    """A controllable aggregator, and the requests it has received."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = RunFolder(folder)
        self.stops: list[bool] = []
        self.monitor = Monitor("run-1", "toy", 7, "a1")
        self.monitor.know(entry(name, seen=name != "carla") for name in CLIENTS)
        self.control = Control(self.monitor, self.stops.append)
        self.control.keep(self.folder)
        about = {"monitor": self.monitor, "control": self.control, "clients": CLIENTS}
        self.aggregator = make_aggregator(**(about | changes))
        self.address = self.aggregator.start("127.0.0.1:0")


def entry(name: str, *, seen: bool = True) -> ClientEntry:
    return ClientEntry(name, seen, 10 + len(name), 2, 2, {}, "0" * 64)


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[Controlled]:
    made = Controlled(tmp_path)
    yield made
    made.aggregator.stop()


def test_the_status_over_the_wire_equals_the_snapshot(controlled: Controlled) -> None:
    controlled.monitor.enter("training", "two members are slow", doing=3, attempt=2)
    controlled.monitor.evaluated(
        {"round": 2, "seen": {"clients": 2, "accuracy_mean": 0.25, "loss_mean": 1.5}, "unseen": None, "global": None}
    )
    worker = Worker(controlled.address, "w1", CLIENTS)
    controlled.aggregator.wait_for(CLIENTS, 10)
    with dialled(controlled.address) as asked:
        reported = asked.status()
    now = controlled.aggregator.activity()
    assert replace(reported, time=0, totals=replace(reported.totals, phases={})) == replace(
        now,
        time=0,
        totals=replace(now.totals, phases={}),
        workers=reported.workers,  # last-seen times differ by moments
    )
    assert (reported.phase, reported.doing, reported.rounds, reported.message) == (
        "training",
        3,
        7,
        "two members are slow",
    )
    assert reported.measured == LastEvaluation(2, {"seen": Group(2, accuracy_mean=0.25, loss_mean=1.5, mean=0.25)})
    assert (reported.clients.roster, reported.clients.observing, reported.clients.connected) == (3, 1, 3)
    assert [(each.name, each.clients) for each in reported.workers] == [("w1", 3)]
    worker.leave()


@pytest.mark.parametrize("sent", ["", "{", "[]", "3", "{}", '{"id": 3, "observes": false}', '{"id": "a"}', "[" * 9999])
def test_clients_that_no_aggregator_lists_are_rejected(sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ControlClient(SimpleNamespace(address="there:1", channel=SimpleNamespace(unary_stream=None)))
    monkeypatch.setattr(client, "_start", lambda *_: [control_pb2.ClientsResponse(clients=[sent])])
    with pytest.raises(RefusedError, match="same version"):
        list(client.clients())
    with pytest.raises(RefusedError, match="same version"):
        from_wire(sent)


def test_a_status_of_another_version_is_rejected() -> None:
    with pytest.raises(RefusedError, match="phase"):
        from_wire('{"run": "x", "method": "m", "phase": "dreaming", "time": 0, "since": 0}')
    assert from_wire('{"run": "x", "method": "m", "phase": "waiting", "time": 0, "since": 0, "new": 1}').run == "x"


def test_clients_are_listed_over_the_wire(controlled: Controlled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "AT_ONCE", 2)
    controlled.monitor.counting({"anna": 4}.get)
    worker = Worker(controlled.address, "w1", ("anna", "carla"))
    controlled.aggregator.wait_for(("anna", "carla"), 10)
    with dialled(controlled.address) as asked:
        assert list(asked.clients()) == [
            RosterClient("anna", False, True, "w1", None, 14, 4, None),
            RosterClient("bo", False, False, None, None, 12, None, None),
            RosterClient("carla", True, True, "w1", None, 15, None, None),
        ]
    worker.leave()


def test_pause_resume_and_stop_over_the_wire(controlled: Controlled) -> None:
    with dialled(controlled.address) as asked:
        changed, now = asked.pause()
        assert (changed, now.paused_by) == (True, OPERATOR)
        assert read_pause(controlled.folder) is not None
        assert asked.pause()[0] is False
        changed, now = asked.resume()
        assert (changed, now.paused_by, asked.resume()[0]) == (True, None, False)
        assert read_pause(controlled.folder) is None
        asked.stop(now=False)
        asked.stop(now=True)
    assert controlled.stops == [False, True]


def test_a_finished_federation_has_a_status_and_rejects_control(controlled: Controlled) -> None:
    controlled.monitor.enter("finished")
    with dialled(controlled.address) as asked:
        assert asked.status().phase == "finished"
        for ask in (asked.pause, asked.resume, lambda: asked.stop(now=False)):
            with pytest.raises(ExperimentError, match="finished"):
                ask()
    assert (controlled.control.paused, controlled.stops) == (None, [])


def test_an_aggregator_without_this_service_is_reported() -> None:
    aggregator = make_aggregator()
    with dialled(aggregator.start("127.0.0.1:0")) as asked, pytest.raises(RefusedError):
        asked.status()
    aggregator.stop()


ROLES = """\
version: 1
identities:
  - {name: eye, token: eye, roles: [watch]}
  - {name: boss, certificate: "URI:urn:fedloom:boss", token: boss, roles: [admin]}
  - {name: north, token: north, roles: [worker], clients: ["*"]}
"""


def test_watchers_may_read_and_operators_control_over_tls_with_an_audit_log(tmp_path: Path) -> None:
    make_ca(tmp_path / "ca")
    make_certificate("server", tmp_path, tmp_path / "ca", hosts=["127.0.0.1"])
    (tmp_path / "identities.yaml").write_text(ROLES)
    tokens = {name: add_token(tmp_path / "tokens.json", name)[0] for name in ("eye", "boss", "north")}
    protection = Protection(
        ServerOptions(
            certificate=tmp_path / "server/tls.crt",
            key=tmp_path / "server/tls.key",
            ca=tmp_path / "ca/ca.crt",
            tokens=tmp_path / "tokens.json",
            identities=tmp_path / "identities.yaml",
        )
    )
    audit = tmp_path / "audit.jsonl"
    made = Controlled(tmp_path, protection=protection, audit=Audit(audit))

    def asking(name: str) -> AbstractContextManager[ControlClient]:
        pair = make_certificate(name, tmp_path, tmp_path / "ca", replace=True)
        shown = ClientOptions(ca=tmp_path / "ca/ca.crt", certificate=pair.certificate, key=pair.key, token=tokens[name])
        return dialled(made.address, Credentials(shown))

    with asking("eye") as eye, asking("north") as north, asking("boss") as boss:
        assert eye.status().round == 0
        assert [client.id for client in eye.clients()] == list(CLIENTS)
        for ask in (eye.pause, eye.resume, lambda: eye.stop(now=True), north.status, lambda: list(north.clients())):
            with pytest.raises(RefusedError):
                ask()
        assert (made.control.paused, made.stops) == (None, [])
        assert boss.pause()[1].paused_by == "boss"
        assert eye.status().paused_by == "boss"
        boss.resume()
        boss.stop(now=False)
    assert made.stops == [False]
    events = [json.loads(line) for line in audit.read_text().splitlines()]
    done = [(event["identity"], event["what"]) for event in events if event["event"] == "control"]
    assert done == [("boss", "pause"), ("boss", "resume"), ("boss", "stop")]
    (refused,) = (event for event in events if event["event"] == "refused")  # other rejections of this host are counted
    assert (refused["identity"], refused["call"]) == ("eye", "/fedloom.v1.Control/Pause")
    stranger = Credentials(ClientOptions(ca=tmp_path / "ca/ca.crt"))
    with dialled(made.address, stranger) as nobody, pytest.raises(RefusedError, match=r"tls\.crt"):
        nobody.status()
    with dialled(made.address) as plain, pytest.raises(AbandonedError):
        plain.status()
    made.aggregator.stop()


def test_actions_that_cannot_be_audited_are_rejected(tmp_path: Path) -> None:
    add_token(tmp_path / "tokens.json", "x")
    token, _ = add_token(tmp_path / "tokens.json", "boss")
    (tmp_path / "identities.yaml").write_text("version: 1\nidentities: [{name: boss, token: boss, roles: [admin]}]\n")
    protection = Protection(ServerOptions(tokens=tmp_path / "tokens.json", identities=tmp_path / "identities.yaml"))
    made = Controlled(tmp_path, protection=protection, audit=Audit(tmp_path / "gone" / "audit.jsonl"))
    with dialled(made.address, Credentials(ClientOptions(token=token))) as boss:
        assert boss.status().round == 0
        with pytest.raises(StorageError, match=r"audit\.jsonl"):
            boss.pause()
    assert made.control.paused is None
    made.aggregator.stop()
