"""Aggregator side of the wire protocol: a gRPC server that carries exchanges to connected workers (docs/wire.md).

Streams, frames and bookkeeping live on one event loop in a thread of its own. The thread that called
:meth:`Aggregator.exchange` decodes and checks values while other replies are still in transit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch

import fedloom
from fedloom.data.manifest import CLIENT_ID
from fedloom.errors import ExperimentError, QuorumError
from fedloom.federation.activity import Activity, Connected, ConnectedWorker, RosterClient
from fedloom.federation.carrier import Call, ConversationKey, Lost, Refusals, Traffic
from fedloom.federation.control import Control
from fedloom.federation.monitor import Monitor
from fedloom.federation.roster import AvailableClients, Member
from fedloom.federation.silence import Silence
from fedloom.federation.validation import non_finite
from fedloom.messages import Message
from fedloom.transport import stream
from fedloom.transport.codec import (
    FRAME_BYTES,
    SEAL,
    SEAL_BYTES,
    Refusal,
    WireError,
    encode,
    parse,
    sealed,
    serialize,
)
from fedloom.transport.control import CONTROL
from fedloom.transport.control_service import ControlService
from fedloom.transport.dispatcher import STOPPED, Dispatcher
from fedloom.transport.exchanges import Arrived, Clients, Exchange, Link, WorkerInfo
from fedloom.transport.gate import PEER, AuthInterceptor, Peer, watch_certificate
from fedloom.transport.limits import RateLimitFilter, TokenBucket, connections
from fedloom.transport.notices import ProgressPublisher
from fedloom.transport.personalization import Personalization
from fedloom.transport.server import listening
from fedloom.transport.spoken import SERVICE as MODELS
from fedloom.transport.stream import LAST_BACKOFF_S, METHOD, OBSERVATION, PROTOCOL, SERVER_OPTIONS, SERVICE, WATCH
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.trust.access import Denied
from fedloom.trust.audit import Audit
from fedloom.trust.identities import Action, Identity
from fedloom.trust.options import Protection
from fedloom.words import pluralize, printable

log = logging.getLogger("fedloom.transport.aggregator")
log.addFilter(RateLimitFilter())

HELLO_TIMEOUT_S = 10.0
NAME_CHARACTERS = 200
ROWS_EVERY_S = 0.25  # how often to look for rows that show no sign of progress
MOST_EXAMPLES = 10**9  # per client and split
LINGER_S = 2 * LAST_BACKOFF_S  # a worker that has lost its connection reconnects within this time
HELLO_BYTES = 10_000  # a Hello of this size costs as much as one more Hello
CONNECTIONS_EVERY_S = 5.0  # how often to check whether the connection limit is reached
STATUS = {
    Refusal.CHECKSUM: grpc.StatusCode.DATA_LOSS,
    Refusal.FLOOD: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.UNREAD: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.NAME: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.JOINS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.SILENT: grpc.StatusCode.UNAVAILABLE,
}
"""gRPC status that ends a stream, by refusal; INVALID_ARGUMENT for any other refusal."""
ALIVE_S = 5.0  # how often a waiting exchange checks that the event loop is alive


class Aggregator:
    """gRPC server that carries a federation's exchanges.

    Parameters
    ----------
    run, incarnation
        The run, and the id of this aggregator process; replies to another one are refused.
    experiment
        The shared part of the experiment, as JSON; sent to every worker in its Welcome.
    vocabulary
        Message classes allowed in replies, by class name.
    dtype
        Type of the run's floating-point numbers.
    clients
        Ids of all clients of the run, seen and unseen. A worker that names any other client is refused.
    algorithm, version
        Algorithm and version that a worker must have to be admitted.
    notices
        Progress published to watchers; without it, the run cannot be watched.
    say
        Shows one line to a person, for example that clients have no worker. Called on the event loop's thread.
    protection
        TLS and access rules. Without it, anyone is admitted and only this machine is served.
    audit
        Audit log of admissions and refusals; without it, none are logged.
    roster
        Clients that train; an observer may not answer for them.
    presence
        Record of connected clients, in a federation whose clients bring data of their own and come and go; None in any
        other federation.
    classes
        Number of classes C, where ``presence`` is given.
    monitor
        State of the round loop; without it, the loop's state is not reported.
    control
        Requests that an operator may make of the round loop. Without it, the control service is not offered.
    models
        Service that hands out models to clients that are not workers; without it, none are handed out.
    health
        ``host:port`` on which only health is served, in plaintext; None disables it.

    Examples
    --------
    ::

        aggregator = Aggregator(run, incarnation, experiment, vocabulary, torch.float32, clients, "pefll", 1)
        address = aggregator.start("127.0.0.1:0")
        aggregator.wait_for(manifest.roster, timeout_s=60)
        answers = aggregator.exchange(call)
        aggregator.close(call.key)
        aggregator.stop(finished=True)
    """

    def __init__(
        self,
        run: str,
        incarnation: str,
        experiment: str,
        vocabulary: Mapping[str, type[Message]],
        dtype: torch.dtype,
        clients: Iterable[str],
        algorithm: str,
        version: int,
        notices: ProgressPublisher | None = None,
        say: Callable[[str], None] | None = None,
        protection: Protection | None = None,
        audit: Audit | None = None,
        roster: Collection[str] = (),
        presence: AvailableClients | None = None,
        classes: int = 0,
        monitor: Monitor | None = None,
        control: Control | None = None,
        models: Personalization | None = None,
        health: str | None = None,
    ) -> None:
        self._run_name = run
        self._control = control
        self._monitor = monitor or Monitor()
        self._health = health
        self._incarnation = incarnation
        self._presence = presence
        self._classes = classes
        self._models = models
        self._algorithm = algorithm
        self._version = version
        self._notices = notices
        self._say = say
        self._protection = protection or Protection()
        self._audit = audit or Audit()
        access = self._protection.access
        self._gate = None if access is None else AuthInterceptor(access, self._audit)
        self._roster = frozenset(roster)
        self._welcome = self._welcoming(experiment)
        self._up = self._down = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._stopped = False  # guarded by _joined
        self._joined = threading.Condition()  # reentrant
        self._workers: dict[str, WorkerInfo] = {}  # guarded by _joined
        self._index = {client: i for i, client in enumerate(clients)}
        self._served = np.zeros(len(self._index), np.int32)  # workers that may serve each client; guarded by _joined
        self._absent: dict[str, float] = {}  # when each absent worker left; guarded by _joined
        self._started_at = time.monotonic()
        self._joins = TokenBucket(1_000, 200)
        self._most = connections()
        self._board = Dispatcher(run, incarnation, vocabulary, dtype, self._publish, self._tell)

    # ---- used by the round loop, in its own thread

    def _welcoming(self, experiment: str) -> bytes:
        welcome = wire.Welcome(run=self._run_name, incarnation=self._incarnation, experiment=experiment)
        frame = _frame(wire.AggregatorPart(welcome=welcome))
        if len(frame) > FRAME_BYTES:
            raise ExperimentError(
                f"the experiment as JSON takes {len(frame)} bytes on the wire, allowed: {FRAME_BYTES}"
            )
        return frame

    def start_new_session(self, incarnation: str, experiment: str) -> None:
        """Switch to another incarnation and Welcome; connected workers reconnect to receive it.

        All conversations must be closed first.
        """

        def renamed() -> None:
            self._incarnation = incarnation
            self._welcome = self._welcoming(experiment)
            self._board.rename(incarnation)

        self._post(renamed)

    def start(self, address: str) -> str:
        """Serve on ``host:port`` (port 0: any free port) and return the bound address.

        Raises
        ------
        ExperimentError
            If the address is invalid, the port is taken, the address cannot be bound, or an unprotected aggregator
            would be reachable from other machines.
        """
        if self._thread is not None:
            raise RuntimeError("the aggregator has been started already")
        started: Future[str] = Future()
        self._thread = threading.Thread(target=self._run_loop, args=(address, started), name="aggregator", daemon=True)
        self._thread.start()
        try:
            return started.result()
        except BaseException:
            self._thread.join()
            raise

    def dismiss(self, finished: bool = False) -> None:
        """End all workers' streams; waiting exchanges end with all rows lost. Idempotent.

        Parameters
        ----------
        finished
            Tell the workers, including those that connect later, that the run is over, so that they exit instead of
            reconnecting.
        """
        self._post(self._begin_dismissal, finished)

    def linger(self, resumed: bool) -> None:
        """Wait, after :meth:`dismiss`, for workers that have yet to learn that the run is over.

        A worker that has lost its connection reconnects within ``LINGER_S``. The wait ends that long after the last
        disconnect of a worker that has not returned. After a resume, workers of the previous aggregator process may
        also connect, so the wait lasts at least that long after the start.

        Parameters
        ----------
        resumed
            True if workers of an earlier aggregator process may connect.
        """
        with self._joined:
            while True:
                last = max(self._absent.values(), default=-math.inf)
                since = max(last, self._started_at) if resumed else last
                remaining = since + LINGER_S - time.monotonic()
                if remaining <= 0:
                    return
                self._joined.wait(remaining)

    def stop(self, finished: bool = False) -> None:
        """Dismiss the workers, end all streams and free the port. Idempotent."""
        if self._thread is None or self._loop is None:
            return
        self.dismiss(finished)
        self._post(self._begin_stop)
        self._thread.join()

    @property
    def traffic(self) -> Traffic:
        """Bytes of serialized frames since the start: ``up`` from workers, ``down`` to them."""
        return Traffic(up=self._up, down=self._down)

    @property
    def refusals(self) -> Refusals:
        """Refused or dropped parts since the start, by kind (``fedloom.transport.codec.Refusal``)."""
        return self._board.refusals

    @property
    def silence(self) -> Silence:
        """Clients that missed a deadline."""
        return self._board.silence

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the connected workers, by name."""
        with self._joined:
            return tuple(self._workers[name] for name in sorted(self._workers))

    def activity(self) -> Activity:
        """Return the state of the federation; callable from any thread.

        Raises
        ------
        RuntimeError
            If the aggregator is not started, or has been stopped.
        """
        if self._loop is None or not self._alive():
            raise RuntimeError("the aggregator is not started, or has been stopped")

        async def asked() -> Activity:
            return self._activity()

        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result(ALIVE_S)

    def unserved(self, clients: Iterable[str]) -> tuple[str, ...]:
        """Return the given clients that no connected worker may serve, in the given order."""
        with self._joined:
            served = (
                {client for client, i in self._index.items() if self._served[i]}
                if not self._served.all()
                else self._index
            )
        return tuple(client for client in clients if client not in served)

    def wait_for(self, clients: Collection[str], timeout_s: float, workers: int = 1) -> None:
        """Wait until a connected worker may serve each client and at least ``workers`` workers are connected.

        Raises
        ------
        QuorumError
            If this is not so after ``timeout_s`` seconds (the error names the clients), or if the aggregator is
            stopped.
        """
        deadline = time.monotonic() + timeout_s
        with self._joined:
            while True:
                left = self.unserved(sorted(clients))
                if self._stopped:
                    raise QuorumError("the aggregator was stopped while it waited for workers")
                if not left and len(self._workers) >= workers:
                    return
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._too_few(left, clients, timeout_s, workers)
                self._joined.wait(remaining)

    def _too_few(self, left: Sequence[str], clients: Collection[str], timeout_s: float, workers: int) -> QuorumError:
        there = sorted(self._workers)
        connected = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "") or "none"
        if left:
            names = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            what = f"no worker serves {len(left)} of {pluralize(len(clients), 'client')}: {names}"
        else:
            what = f"{len(self._workers)} of {pluralize(workers, 'worker')} joined"
        return QuorumError(
            f"after {timeout_s:g} s {what} (connected workers: {connected})",
            hint="start a `fedloom worker` that has their shards, or look at the workers' logs",
        )

    def exchange(self, call: Call) -> list[Message | Lost]:
        """Carry one exchange: send, wait, and return one checked answer per row (see ``Carrier``)."""
        exchange = Exchange(call)
        self._check_sendable(call)
        if not self._post(self._board.open, exchange):
            return [Lost(STOPPED)] * len(call.rows)
        answers: dict[int, Message | Lost] = {}
        try:
            while len(answers) < len(call.rows):
                remaining = exchange.remaining_s()
                try:
                    item = exchange.inbox.get(timeout=ALIVE_S if remaining is None else min(remaining, ALIVE_S))
                except queue.Empty:
                    if remaining is not None and remaining <= ALIVE_S:
                        break
                    if not self._alive():
                        break
                    continue
                if isinstance(item, Exception):
                    raise item
                row, outcome = item
                answers[row] = outcome if isinstance(outcome, Lost) else self._decode(exchange, row, outcome)
        finally:
            self._post(self._board.finish, exchange)
        if len(answers) < len(call.rows) and self._alive():
            exchange.finished.wait(ALIVE_S)  # silent clients are recorded before the next cohort is drawn
        late = Lost(f"deadline: no answer after {call.deadline_s} s" if self._alive() else STOPPED)
        return [answers.get(row, late) for row in call.rows]

    def close(self, key: ConversationKey) -> None:
        """End a conversation and notify the workers that hold rows of it. Idempotent."""
        self._post(self._board.close, key)

    def _check_sendable(self, call: Call) -> None:
        encode(call.message)  # a dtype that the wire cannot carry is the caller's error: raise in its thread
        begin = sum(len(client.encode()) + 2 for client in call.clients) + 6 * len(call.rows)
        if begin > FRAME_BYTES // 2:
            raise ExperimentError(
                f"a cohort of {len(call.rows)} clients is too large for one conversation over the wire "
                f"(ids and rows take {begin} bytes, allowed: {FRAME_BYTES // 2})"
            )

    def _decode(self, exchange: Exchange, row: int, arrived: Arrived) -> Message | Lost:
        try:
            message = arrived.message()
            if (reason := non_finite(message)) is not None:
                raise WireError(Refusal.NON_FINITE, reason)
        except WireError as error:
            return Lost(self._board.receiver.refuse(error, exchange, row, arrived.worker))
        return message

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _post(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Run a function on the event loop; return False if the loop has ended and has nothing left to do."""
        if self._loop is None:
            raise RuntimeError("the aggregator has not been started")
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed
            return False
        return True

    # ---- the event loop's thread

    def _run_loop(self, address: str, started: Future[str]) -> None:
        try:
            asyncio.run(self._serve(address, started))
        except BaseException as error:
            if started.done():
                log.exception("the aggregator's event loop failed")
                raise
            started.set_exception(error)

    async def _serve(self, address: str, started: Future[str]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        # Frames are read and written as bytes, so that an invalid frame ends its stream with our status and the traffic
        # counts exactly the bytes sent.
        services: dict[str, dict[str, Any]] = {SERVICE: {METHOD: grpc.stream_stream_rpc_method_handler(self._join)}}
        if self._notices is not None:
            services[OBSERVATION] = {
                WATCH: grpc.unary_stream_rpc_method_handler(
                    partial(self._watch, self._notices), wire.WatchRequest.FromString, wire.Progress.SerializeToString
                )
            }
        if self._control is not None:
            asked = ControlService(self._control, self._activity, self._roster_clients, self._announce)
            services[CONTROL] = asked.methods()
        if self._models is not None:
            services[MODELS] = self._models.handlers
            await self._models.begin()
        options = (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", self._most))
        at = await listening(address, services, self._protection, self._gate, options, self._health)
        started.set_result(at.address)
        log.debug("serving on %s", at.address)
        tls = self._protection.tls
        watching = [asyncio.create_task(self._watch_connections()), asyncio.create_task(self._watch_rows())]
        if self._gate is not None:
            watching.append(asyncio.create_task(self._gate.watch()))
        if tls is not None:
            watching.append(asyncio.create_task(watch_certificate(tls, self._tell, self._audit)))
        await self._stopping.wait()
        for task in watching:
            task.cancel()
        await at.stop(1.0)
        if self._models is not None:
            await self._models.end()
        # gRPC does not wait for handlers to finish, and prints a traceback for those that are cancelled then.
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=1.0)

    def _begin_dismissal(self, finished: bool) -> None:
        with self._joined:
            self._stopped = True
            self._joined.notify_all()
        if self._presence is not None:
            self._presence.end()
        self._board.stop(finished)

    async def _watch_rows(self) -> None:
        """Look periodically for rows that show no sign of progress."""
        while True:
            await asyncio.sleep(ROWS_EVERY_S)
            self._board.ask_others()

    async def _watch_connections(self) -> None:
        """Report when the connection limit is reached, which gRPC itself does not report."""
        others, full = _sockets(), False
        while True:
            await asyncio.sleep(CONNECTIONS_EVERY_S)
            was, full = full, _sockets() - others >= self._most
            if full and not was:
                self._tell(f"{self._most} connections are open, as many as may be: others cannot join until some end")

    def _begin_stop(self) -> None:
        assert self._stopping is not None
        self._stopping.set()

    async def _join(self, _: Any, context: Any) -> None:
        """Handle one worker's stream, from its Hello to its end."""
        try:
            hello, welcome = await self._greet(context)
        except WireError as unfit:
            self._board.refusals.count(unfit.refusal)
            log.warning("ended the stream of %s: %s", context.peer(), unfit)
            await context.abort(STATUS[unfit.refusal], str(unfit))
            return
        except Denied as denied:
            self._board.refusals.count(Refusal.HELLO)
            log.warning("refused a worker (%s): %s", context.peer(), denied)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(denied))
            return
        if hello is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "refused, see the frame before")
            return
        if welcome is not self._welcome:  # the incarnation has changed meanwhile: the worker must reconnect
            return
        device = printable(hello.device, NAME_CHARACTERS)
        if self._presence is None:
            worker = WorkerInfo(hello.worker, hello.incarnation, Clients(self._index, hello.clients), device)
        else:
            worker = WorkerInfo(hello.worker, hello.incarnation, frozenset(hello.clients), device, _members(hello))
            if self._board.claimed(worker.name, hello.clients) is not None:  # claimed after this worker was admitted
                await context.abort(STATUS[Refusal.NAME], "another worker has come with one of its clients")
                return
            if (peer := PEER.get()) is not None and (reason := self._crowd(peer.identity, hello)):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{peer.identity.name} {reason}")
                return
        link = Link(worker, owner=_owner())
        if self._board.taken(worker.name, worker.incarnation, link.owner):  # taken after this worker was admitted
            await context.abort(STATUS[Refusal.NAME], str(WireError(Refusal.NAME, f"worker {worker.name}")))
            return
        self._board.enter(link, hello.held if hello.held_of == self._incarnation else ())
        with self._joined:
            if self._stopped:  # this worker is told to leave and is not listed
                self._absent.pop(worker.name, None)
                self._joined.notify_all()

        async def write(frame: bytes) -> None:
            self._down += len(frame)
            await context.write(frame)
            if frame is not link.outbox.heartbeat:
                link.sign_at = time.monotonic()

        reader = asyncio.create_task(self._read(link, context))
        writer = asyncio.create_task(link.outbox.drain(write))
        ended = asyncio.create_task(link.ended.wait())
        try:
            await asyncio.wait((reader, writer, ended), return_when=asyncio.FIRST_COMPLETED)
            error = link.fault
            if reader.done() and isinstance(found := reader.exception(), WireError):
                error = found
            if error is not None:
                self._board.refusals.count(error.refusal)
                log.warning("ended the stream of worker %s: %s", link.name, error, extra={"worker": link.name})
                self._board.leave(link)  # now, because a worker that does not read does not read its status either
                await context.abort(STATUS.get(error.refusal, grpc.StatusCode.INVALID_ARGUMENT), str(error))
        finally:
            self._board.leave(link)
            for task in (reader, writer, ended):
                task.cancel()
            await asyncio.gather(reader, writer, ended, return_exceptions=True)

    async def _greet(self, context: Any) -> tuple[wire.Hello | None, bytes]:
        """Read the Hello and answer with Welcome, returning both; or answer with Refused and return None.

        Raises
        ------
        WireError
            If the worker must reconnect: its Hello arrived damaged, its name is taken, or too many join at once.
        Denied
            If the sender may not answer for these clients, or may not use this worker name.
        """
        peer = PEER.get()
        code, reason = wire.REFUSAL_CODE_HELLO, "the first part must be a Hello"
        try:
            data = await asyncio.wait_for(context.read(), HELLO_TIMEOUT_S)
            if data is grpc.aio.EOF:
                return None, b""
            self._up += len(data)
            if not self._joins.spend(1 + len(data) / HELLO_BYTES):
                raise WireError(Refusal.JOINS, "come again")
            hello = _hello(data)
            if peer is not None:
                self._authorize(peer, hello)
            code, reason = self._judge(hello)
        except TimeoutError:
            reason = f"no Hello within {HELLO_TIMEOUT_S:g} s"
        except WireError as error:
            if error.refusal in STATUS:
                raise
            reason = str(error)
        if reason:
            self._board.refusals.count(Refusal.HELLO)
            log.warning("refused a worker (%s): %s", context.peer(), reason)
            if peer is not None:
                peer.refuse("hello", reason)
            frame = _frame(wire.AggregatorPart(refused=wire.Refused(code=code, reason=reason)))
            self._down += len(frame)
            await context.write(frame)
            return None, b""
        if peer is not None:
            peer.join(worker=hello.worker, incarnation=hello.incarnation, clients=len(hello.clients))
        elif self._board.taken(hello.worker, hello.incarnation, None):
            raise WireError(Refusal.NAME, f"worker {hello.worker}")
        welcome = self._welcome
        self._down += len(welcome)
        await context.write(welcome)
        return hello, welcome

    def _authorize(self, peer: Peer, hello: wire.Hello) -> None:
        """Check that a peer may act as this worker.

        Raises
        ------
        Denied
            If it may not.
        """
        identity, kind, reason = peer.identity, "clients", ""
        if foreign := identity.foreign(hello.clients):
            reason = f"may not speak for {_some(foreign)}"
        elif not identity.may(Action.TRAIN) and (training := self._training(hello)):
            reason = f"is an observer, and may not speak for clients that train: {_some(sorted(training))}"
        elif crowd := self._crowd(identity, hello):
            reason = crowd
        elif self._board.taken(hello.worker, hello.incarnation, identity.name):
            kind, reason = "name", f"may not be worker {hello.worker!r}, which is connected and somebody else's"
        if reason:
            peer.refuse(kind, reason)
            raise Denied(f"{identity.name} {reason}", identity)

    def _crowd(self, identity: Identity, hello: wire.Hello) -> str:
        """Return why an identity announces too many clients with data of their own; empty if it does not."""
        if self._presence is None or identity.max_clients is None:
            return ""
        others = self._board.announced(identity.name, hello.worker)
        if others + len(hello.clients) <= identity.max_clients:
            return ""
        elsewhere = f", and {others} through other workers" if others else ""
        return (
            f"may announce {pluralize(identity.max_clients, 'client')} at one time, and announces "
            f"{len(hello.clients)}{elsewhere}: raise its max_clients in a table of identities"
        )

    def _training(self, hello: wire.Hello) -> set[str]:
        """Return the worker's clients that train; all of them if their announcements are missing."""
        if self._presence is None:
            return set(self._roster.intersection(hello.clients))
        if len(hello.announced) != len(hello.clients):
            return set(hello.clients)
        return {client for client, told in zip(hello.clients, hello.announced, strict=True) if not told.observer}

    @staticmethod
    async def _watch(notices: ProgressPublisher, request: wire.WatchRequest, context: Any) -> None:
        """Stream the run's progress to a watcher."""
        if (peer := PEER.get()) is not None:
            peer.join()
        await notices.watch(request, context)

    def _judge(self, hello: wire.Hello) -> tuple[wire.RefusalCode, str]:
        """Return why a worker cannot join; the reason is empty if it can."""
        if hello.protocol != PROTOCOL:
            return wire.REFUSAL_CODE_PROTOCOL, f"protocol {hello.protocol}, this aggregator speaks {PROTOCOL}"
        if hello.package != fedloom.__version__:
            found = printable(hello.package, NAME_CHARACTERS)
            return wire.REFUSAL_CODE_PACKAGE, f"fedloom {found}, this aggregator is {fedloom.__version__}"
        version = hello.algorithms.get(self._algorithm, None) if self._algorithm in hello.algorithms else None
        if version != self._version:
            found = "not there" if version is None else f"version {version}"
            return wire.REFUSAL_CODE_ALGORITHM, (
                f"algorithm {self._algorithm} is {found} at the worker, the run needs version {self._version}"
            )
        if not 0 < len(hello.worker) <= NAME_CHARACTERS or not 0 < len(hello.incarnation) <= NAME_CHARACTERS:
            return wire.REFUSAL_CODE_HELLO, f"worker and incarnation must have 1 to {NAME_CHARACTERS} characters"
        if not hello.worker.isprintable() or not hello.incarnation.isprintable():
            return wire.REFUSAL_CODE_HELLO, "worker and incarnation must consist of characters that print"
        if self._presence is not None:
            return self._judge_members(hello)
        stranger = next((client for client in hello.clients if client not in self._index), None)
        if stranger is not None:
            found = printable(stranger, NAME_CHARACTERS)
            return wire.REFUSAL_CODE_CLIENTS, f"the run has no client {found}: the worker has another partition"
        return wire.REFUSAL_CODE_UNSPECIFIED, ""

    def _judge_members(self, hello: wire.Hello) -> tuple[wire.RefusalCode, str]:
        """Return what is wrong with clients that bring data of their own; the reason is empty if nothing is."""
        code = wire.REFUSAL_CODE_CLIENTS
        if not hello.clients or len(hello.announced) != len(hello.clients):
            return code, "this federation's clients bring data of their own: start `fedloom worker --data DIR`"
        for client, told in zip(hello.clients, hello.announced, strict=True):
            sizes, counts = (told.train, told.validation, told.test), told.class_counts
            if not CLIENT_ID.fullmatch(client):
                return code, "a client's id must have letters, digits, '.', '_' and '-', at most 128"
            if not all(0 < size <= MOST_EXAMPLES for size in sizes):
                return code, f"client {client}: found sizes {sizes}; allowed: from 1 to {MOST_EXAMPLES:,}"
            if counts and (len(counts) != self._classes or sum(counts) != told.train):
                return code, f"client {client}: class counts must be {self._classes}, of {told.train} examples"
        if len(set(hello.clients)) != len(hello.clients):
            return code, "a client is there twice"
        if (claimed := self._board.claimed(hello.worker, hello.clients)) is not None:
            return wire.REFUSAL_CODE_CLIENT_TAKEN, f"client {claimed} is served by another worker"
        return wire.REFUSAL_CODE_UNSPECIFIED, ""

    def _activity(self) -> Activity:
        """Return the state of the federation; runs on the event loop's thread."""
        since = time.time() - time.monotonic()  # wall-clock time at zero of the monotonic clock
        workers = tuple(
            ConnectedWorker(
                link.name,
                link.owner,
                link.worker.device,
                len(link.worker.clients),
                since + link.joined_at,
                since + link.sign_at,
            )
            for link in self._board.links()
        )
        refusals = dict(self._board.refusals.counts)
        awaiting = tuple(self._board.awaiting())
        return self._monitor.now(Connected(workers, awaiting, self._connected(), refusals, self._up, self._down))

    def _connected(self) -> int:
        """Return how many clients of the roster are served by a connected worker."""
        if self._presence is None:
            with self._joined:
                return int((self._served > 0).sum())
        roster = self._monitor.roster
        return sum(member.id in roster for link in self._board.links() for member in link.worker.members)

    def _roster_clients(self) -> Iterator[RosterClient]:
        """Yield the clients of the roster, sorted by id."""
        links, monitor = self._board.links(), self._monitor
        roster = monitor.roster
        awaited = {each.client: each.since for each in self._board.awaiting()}
        serving: dict[str, Link] = {}
        if self._presence is None:
            first = np.full(len(self._index), -1)
            for i, link in enumerate(links):
                if isinstance(link.worker.clients, Clients):
                    first[(link.worker.clients.mask > 0) & (first < 0)] = i
            serving = {client: links[first[i]] for client, i in self._index.items() if first[i] >= 0}
        else:
            serving = {client: link for link in links for client in link.worker.clients}
        for client in sorted(roster):
            entry, at = roster[client], serving.get(client)
            yield RosterClient(
                client,
                not entry.seen,
                at is not None,
                None if at is None else at.name,
                None if at is None else at.owner,
                entry.train,
                monitor.last_round(client),
                awaited.get(client),
            )

    def _publish(self, come: WorkerInfo | None, gone: WorkerInfo | None) -> None:
        with self._joined:
            if gone is not None:
                if isinstance(gone.clients, Clients):
                    self._served -= gone.clients.mask
                del self._workers[gone.name]
                if not self._stopped:
                    self._absent[gone.name] = time.monotonic()
            if come is not None:
                if isinstance(come.clients, Clients):
                    self._served += come.clients.mask
                self._workers[come.name] = come
                self._absent.pop(come.name, None)
            self._joined.notify_all()
            count, unserved = len(self._workers), int((self._served == 0).sum())
        if self._presence is not None:
            self._presence.change(() if come is None else come.members, () if gone is None else gone.members)
        if self._notices is not None:
            self._notices.workers(count, unserved)

    def _tell(self, text: str) -> None:
        """Report what the federation waits for, or what is wrong with it."""
        self._monitor.say(text)
        self._announce(text)

    def _announce(self, text: str) -> None:
        """Report an event."""
        log.warning("%s", text)
        if self._notices is not None:
            self._notices.say(text)
        if self._say is not None:
            self._say(text)

    async def _read(self, link: Link, context: Any) -> None:
        """Read a worker's frames until its stream ends.

        Raises
        ------
        WireError
            If data is not a valid frame, or nothing arrives for ``stream.SILENCE_S``.
        """
        while (data := await self._next(context)) is not grpc.aio.EOF:
            self._up += len(data)
            self._board.receiver.take(link, data)

    @staticmethod
    async def _next(context: Any) -> Any:
        try:
            async with asyncio.timeout(stream.SILENCE_S):
                return await context.read()
        except TimeoutError:
            raise WireError(Refusal.SILENT, f"nothing has come for {stream.SILENCE_S:g} s") from None


def _members(hello: wire.Hello) -> tuple[Member, ...]:
    return tuple(
        Member(
            client,
            told.train,
            told.validation,
            told.test,
            told.labelled,
            told.observer,
            tuple(told.class_counts),
        )
        for client, told in zip(hello.clients, hello.announced, strict=True)
    )


def _owner() -> str | None:
    """Return the name of the current call's identity, if any."""
    peer = PEER.get()
    return None if peer is None else peer.identity.name


def _some(clients: Sequence[str]) -> str:
    """Return the first clients of a list, formatted for a message."""
    shown = ", ".join(printable(client, NAME_CHARACTERS) for client in clients[:3])
    return shown + (f" and {len(clients) - 3} more" if len(clients) > 3 else "")


def _frame(part: wire.AggregatorPart) -> bytes:
    return sealed(serialize(part))


def _sockets() -> int:
    """Return the number of sockets that this process has open."""
    return sum(_is_socket(int(entry.name)) for entry in Path("/dev/fd").iterdir())


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # the directory's own descriptor
        return False


def _hello(data: bytes) -> wire.Hello:
    """Parse a Hello, including one of protocol 1, which has no seals.

    Any other part gives an empty Hello, which is refused.
    """
    if data[-SEAL_BYTES : 1 - SEAL_BYTES] != SEAL:
        with contextlib.suppress(WireError):
            hello = parse(wire.WorkerFrame, data, seal=False).parts[0].hello
            if hello.protocol == 1:
                return hello
    return parse(wire.WorkerFrame, data).parts[0].hello
