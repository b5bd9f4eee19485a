"""Admission of workers: checks a worker's Hello against the run and against the identity of its peer."""

from __future__ import annotations

from collections.abc import Collection

import fedloom
from fedloom.core.words import first_of, pluralize, printable
from fedloom.data.manifest import CLIENT_ID
from fedloom.federation.roster import Member
from fedloom.security.access import Denied
from fedloom.security.identities import Action, Identity
from fedloom.transport.dispatcher import Dispatcher
from fedloom.transport.exchanges import Clients, Link, WorkerInfo
from fedloom.transport.frames import Refusal, WireError, first_part
from fedloom.transport.gate import Peer
from fedloom.transport.served_run import ServedRun
from fedloom.transport.stream import PROTOCOL
from fedloom.transport.wire import federation_pb2 as wire

NAME_CHARACTERS = 200
MOST_EXAMPLES = 10**9  # per client and split


class Admission:
    """Rules by which workers may join a run. Belongs to the event loop's thread."""

    def __init__(self, run: ServedRun, clients: dict[str, int], dispatcher: Dispatcher) -> None:
        self._run = run
        self._clients = clients
        self._roster = frozenset(run.roster)
        self._dispatcher = dispatcher

    def authorize(self, peer: Peer, hello: wire.Hello) -> None:
        """Raise Denied if a peer may not act as this worker."""
        identity, kind, reason = peer.identity, "clients", ""
        if foreign := identity.foreign(hello.clients):
            reason = f"may not act for {_some(foreign)}"
        elif not identity.may(Action.TRAIN) and (training := self._training(hello)):
            reason = f"is an observer, and may not act for clients that train: {_some(training)}"
        elif excess := self._excess_clients(identity, hello):
            reason = excess
        elif self._dispatcher.taken(hello.worker, hello.incarnation, identity.name):
            kind, reason = "name", f"may not use the worker name {hello.worker!r}, which belongs to another identity"
        if reason:
            peer.refuse(kind, reason)
            raise Denied(f"{identity.name} {reason}", identity)

    def link(self, hello: wire.Hello, identity: Identity | None) -> Link:
        """Return the link of an admitted worker.

        Names and clients may have been taken while the Welcome was written, and are checked again.

        Raise WireError if its name, or one of its clients with data of their own, is taken now. Raise Denied if its
        identity has announced too many clients now.
        """
        clients: Collection[str] = frozenset(hello.clients)
        if self._run.presence is None:
            clients = Clients(self._clients, hello.clients)
        elif self._dispatcher.claimed(hello.worker, hello.clients) is not None:
            raise WireError(Refusal.NAME, "another worker has announced one of its clients")
        elif identity is not None and (reason := self._excess_clients(identity, hello)):
            raise Denied(f"{identity.name} {reason}", identity)
        owner = None if identity is None else identity.name
        if self._dispatcher.taken(hello.worker, hello.incarnation, owner):
            raise WireError(Refusal.NAME, f"worker {hello.worker}")
        members = () if self._run.presence is None else _members(hello)
        device = printable(hello.device, NAME_CHARACTERS)
        return Link(WorkerInfo(hello.worker, hello.incarnation, clients, device, members), owner=owner)

    def _excess_clients(self, identity: Identity, hello: wire.Hello) -> str:
        """Return why an identity announces too many clients with data of their own; empty if it does not."""
        if self._run.presence is None or identity.max_clients is None:
            return ""
        others = self._dispatcher.announced(identity.name, hello.worker)
        if others + len(hello.clients) <= identity.max_clients:
            return ""
        elsewhere = f", and {others} through other workers" if others else ""
        return (
            f"may announce {pluralize(identity.max_clients, 'client')} at a time, and announces "
            f"{len(hello.clients)}{elsewhere}: raise its max_clients in the identity file"
        )

    def _training(self, hello: wire.Hello) -> list[str]:
        """Return the worker's clients that train, sorted; all of them if their announcements are missing."""
        if self._run.presence is None:
            return sorted(self._roster.intersection(hello.clients))
        if len(hello.announced) != len(hello.clients):
            return sorted(hello.clients)
        announced = zip(hello.clients, hello.announced, strict=True)
        return sorted(client for client, announcement in announced if not announcement.observer)

    def judge(self, hello: wire.Hello) -> wire.Refused | None:
        """Return why a worker cannot join; None if it can."""
        return (
            self._judge_versions(hello)
            or _judge_names(hello)
            or (self._judge_clients(hello) if self._run.presence is None else self._judge_members(hello))
        )

    def _judge_versions(self, hello: wire.Hello) -> wire.Refused | None:
        if hello.protocol != PROTOCOL:
            reason = f"the worker uses protocol {hello.protocol}, and this aggregator {PROTOCOL}"
            return refusal_part(
                wire.REFUSAL_CODE_PROTOCOL, f"{reason}: install the same version of fedloom on both sides"
            )
        if hello.package != fedloom.__version__:
            found = printable(hello.package, NAME_CHARACTERS)
            return refusal_part(
                wire.REFUSAL_CODE_PACKAGE, f"the worker has fedloom {found}, and this aggregator {fedloom.__version__}"
            )
        run = self._run
        version = hello.algorithms.get(run.algorithm)
        if version != run.version:
            found = "not installed" if version is None else f"version {version}"
            reason = f"algorithm {run.algorithm} is {found} on the worker, and the run needs version {run.version}"
            return refusal_part(wire.REFUSAL_CODE_ALGORITHM, reason)
        return None

    def _judge_clients(self, hello: wire.Hello) -> wire.Refused | None:
        """Return why clients of a partition cannot be admitted; None if they can."""
        stranger = next((client for client in hello.clients if client not in self._clients), None)
        if stranger is None:
            return None
        found = printable(stranger, NAME_CHARACTERS)
        return refusal_part(
            wire.REFUSAL_CODE_CLIENTS, f"the run has no client {found}: the worker has another partition"
        )

    def _judge_members(self, hello: wire.Hello) -> wire.Refused | None:
        """Return why clients with their own data cannot be admitted; None if they can."""
        code = wire.REFUSAL_CODE_CLIENTS
        if not hello.clients or len(hello.announced) != len(hello.clients):
            return refusal_part(
                code, "this federation's clients have their own data: start `fedloom worker --data DIR`"
            )
        for client, announcement in zip(hello.clients, hello.announced, strict=True):
            if reason := self._member_fault(client, announcement):
                return refusal_part(code, reason)
        if len(set(hello.clients)) != len(hello.clients):
            return refusal_part(code, "a client is listed twice")
        if (claimed := self._dispatcher.claimed(hello.worker, hello.clients)) is not None:
            return refusal_part(wire.REFUSAL_CODE_CLIENT_TAKEN, f"client {claimed} is served by another worker")
        return None

    def _member_fault(self, client: str, announced: wire.Announced) -> str:
        sizes, counts = (announced.train, announced.validation, announced.test), announced.class_counts
        if not CLIENT_ID.fullmatch(client):
            return "a client's id must have letters, digits, '.', '_' and '-', at most 128"
        if not all(0 < size <= MOST_EXAMPLES for size in sizes):
            return f"client {client} has splits of {sizes} examples; each must have 1 to {MOST_EXAMPLES:,}"
        if counts and (len(counts) != self._run.classes or sum(counts) != announced.train):
            return f"client {client}: class counts must be {self._run.classes} numbers that sum to {announced.train}"
        return ""


def refusal_part(code: wire.RefusalCode, reason: str) -> wire.Refused:
    """Return the part that refuses a worker."""
    return wire.Refused(code=code, reason=reason)


def parse_hello(data: bytes) -> wire.Hello:
    """Parse a Hello, also of protocol 1; any other part gives an empty Hello, which is refused."""
    hello: wire.Hello = first_part(wire.WorkerFrame, data, lambda part: part.hello.protocol == 1).hello
    return hello


def _judge_names(hello: wire.Hello) -> wire.Refused | None:
    names = hello.worker, hello.incarnation
    if not all(0 < len(name) <= NAME_CHARACTERS for name in names):
        reason = f"worker and incarnation must have 1 to {NAME_CHARACTERS} characters"
        return refusal_part(wire.REFUSAL_CODE_HELLO, reason)
    if not all(name.isprintable() for name in names):
        return refusal_part(wire.REFUSAL_CODE_HELLO, "worker and incarnation must consist of characters that print")
    return None


def _members(hello: wire.Hello) -> tuple[Member, ...]:
    return tuple(
        Member(client, each.train, each.validation, each.test, each.labelled, each.observer, tuple(each.class_counts))
        for client, each in zip(hello.clients, hello.announced, strict=True)
    )


def _some(clients: Collection[str]) -> str:
    return first_of([printable(client, NAME_CHARACTERS) for client in clients], 3)
