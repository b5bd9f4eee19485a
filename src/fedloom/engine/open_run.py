"""Aggregator's run of an open federation, in which clients with their own data join and leave."""

from __future__ import annotations

import itertools
import logging
import math
import time
import uuid

from fedloom.core.address import dialable
from fedloom.data.manifest import Manifest
from fedloom.data.spec import Normalization
from fedloom.engine.assemble import RunContext, make_parts
from fedloom.engine.distributed import welcome, with_workers
from fedloom.engine.engine import Engine, RunResult
from fedloom.engine.run_data import has_normalization, open_manifest
from fedloom.engine.sums import sums_part
from fedloom.errors import QuorumError
from fedloom.federation.measuring import measured_normalization
from fedloom.federation.roster import POLL_S, AvailableClients, OpenRoster
from fedloom.privacy.settings import SMALLEST_SUM
from fedloom.transport.aggregator import Aggregator

log = logging.getLogger(__name__)


def run_open(engine: Engine) -> RunResult:
    """Train the clients that are connected, round after round."""
    presence = AvailableClients()
    with engine.served(presence) as serving:
        engine.make_folder()
        engine.observer.notice(f"waiting for: fedloom worker --aggregator {dialable(serving.address)} --data DIR")
        with engine.guarded(), with_workers(serving, engine.parts, None, engine.stop_request, engine.options.serving):
            parts = _with_normalization(engine, serving.server, presence)
            roster = _roster(engine, serving.server, presence, parts.manifest)
            loop = engine.loop(parts, serving.server, roster)
            engine.resume(loop, serving.notices)
            final = engine.train(loop)
        return engine.conclude(parts, loop, final)


def _roster(engine: Engine, server: Aggregator, presence: AvailableClients, manifest: Manifest) -> OpenRoster:
    federation = engine.experiment.federation
    limits = federation.min_clients, federation.heartbeat_timeout_s
    stop, say = engine.stop_request.event, engine.observer.notice
    return OpenRoster(manifest, presence, *limits, stop, say, engine.monitor, server.silence, federation.min_replies)


def _with_normalization(engine: Engine, server: Aggregator, presence: AvailableClients) -> RunContext:
    """Return the parts once the normalization is known.

    If it is unknown, measure it on the connected clients as soon as there are enough, send it to the workers, and
    save it in the run's manifest.

    Raise QuorumError if no client sends the moments of its inputs. Raise InterruptedRun if the run is stopped while
    waiting.
    """
    if has_normalization(engine.parts.manifest):
        return engine.parts
    assert engine.own is not None
    found = _measured(engine, server, presence)
    parts = make_parts(engine.experiment, open_manifest(engine.experiment, engine.own, found))
    engine.folder.write("partition.json", parts.manifest.to_json())
    server.start_new_session(uuid.uuid4().hex, welcome(parts))
    return parts


def _measured(engine: Engine, server: Aggregator, presence: AvailableClients) -> Normalization:
    """Measure the normalization on the connected clients.

    If all of them are silent, wait for others. If they answer, but none sends its sums, wait for others for as long as
    an absent client stays in the roster.
    """
    assert engine.own is not None
    federation = engine.experiment.federation
    roster = _roster(engine, server, presence, engine.parts.manifest)
    if federation.secure_aggregation is not None:
        return _measured_securely(engine, server, presence, roster)
    refusing_clients: set[str] = set()
    over_at = math.inf
    while True:
        roster.settle(0, evaluating=True)
        apart = refusing_clients | server.silence.silent
        clients = {entry.id: entry.train for entry in roster.manifest.clients if entry.seen and entry.id not in apart}
        if clients:
            try:
                return measured_normalization(server, engine.own, clients, federation.deadline_s)
            except QuorumError as error:
                failure = error
            if new_clients := clients.keys() - server.silence.silent:
                refusing_clients |= new_clients
                over_at = time.monotonic() + federation.heartbeat_timeout_s
        elif time.monotonic() < over_at:
            presence.wait(POLL_S)
        else:
            raise failure


def _measured_securely(
    engine: Engine, server: Aggregator, presence: AvailableClients, roster: OpenRoster
) -> Normalization:
    """Measure the normalization in a secure sum over the connected clients that are not silent.

    It is not known which client makes a sum fail, so all are asked again, for as long as an absent client stays in the
    roster.
    """
    assert engine.own is not None
    federation = engine.experiment.federation
    secure = federation.secure_aggregation
    assert secure is not None
    over_at, attempts = math.inf, itertools.count()
    while True:
        roster.settle(0, evaluating=True)
        silent = server.silence.silent
        clients = {entry.id: entry.train for entry in roster.manifest.clients if entry.seen and entry.id not in silent}
        if len(clients) >= SMALLEST_SUM:
            try:
                return sums_part().securely_measured_normalization(
                    server,
                    engine.own,
                    clients,
                    secure,
                    deadline_s=federation.deadline_s,
                    stop=engine.stop_request.event,
                    attempt=next(attempts),
                )
            except QuorumError as error:
                over_at = min(over_at, time.monotonic() + federation.heartbeat_timeout_s)
                if time.monotonic() >= over_at:
                    raise
                log.warning("%s; trying again", error)
        presence.wait(POLL_S)
