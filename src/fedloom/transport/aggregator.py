"""Aggregator side of the wire protocol: a gRPC server that carries exchanges to connected workers (docs/wire.md).

Streams, frames and bookkeeping live on one event loop in its own thread. The thread that called
:meth:`Aggregator.exchange` decodes and checks values while other replies are still in transit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from fedloom.core.memory import SPOOLED_BYTES, return_freed_memory
from fedloom.errors import ExperimentError
from fedloom.federation.activity import Activity
from fedloom.federation.monitor import Control, Monitor
from fedloom.federation.silence import Silence
from fedloom.federation.standing import Standing
from fedloom.federation.transport import Call, ConversationKey, Lost, Refusals, Traffic
from fedloom.federation.validation import non_finite
from fedloom.messages import Message
from fedloom.security.audit import Audit
from fedloom.security.options import Protection
from fedloom.transport.codec import Assembler, encode
from fedloom.transport.connected import ConnectedWorkers, LiveStatus
from fedloom.transport.control import CONTROL
from fedloom.transport.control_service import ControlService, ProgressPublisher
from fedloom.transport.dispatcher import STOPPED, Dispatcher
from fedloom.transport.exchanges import Arrived, Exchange, ServedRun, WorkerInfo
from fedloom.transport.frames import FRAME_BYTES, Refusal, WireError
from fedloom.transport.limits import RateLimitFilter, connections
from fedloom.transport.personalization import Personalization
from fedloom.transport.server import SERVER_OPTIONS, listening
from fedloom.transport.stream import METHOD, MODELS, SERVICE
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.transport.worker_streams import Admission, ByteCount, WorkerStreams

log = logging.getLogger("fedloom.transport.aggregator")
log.addFilter(RateLimitFilter())

ROWS_EVERY_S = 0.25  # how often to look for rows that show no sign of progress
STANDING_EVERY_S = 5.0  # the shortest time between two changes of the standing that members are sent
CONNECTIONS_EVERY_S = 5.0  # how often to check whether the connection limit is reached
ALIVE_S = 5.0  # how often a waiting exchange checks that the event loop is alive


class Aggregator:
    """gRPC server that carries a federation's exchanges.

    Parameters
    ----------
    run
        Run that is served.
    protection
        TLS and access rules. Without it, anyone is admitted and only this machine is served.
    audit
        Audit log of admissions and refusals; without it, none are logged.
    monitor
        State of the round loop; without it, the loop's state is not reported.
    notices
        Progress published to watchers; without it, the run cannot be watched.
    control
        Requests that an operator may make of the round loop; without it, the federation can only be observed.
    models
        Service of models for clients that are not workers; None: no service.
    say
        Shows one line to the user, for example that clients have no worker. Called on the event loop's thread.
    health
        ``host:port`` on which only health is served, in plaintext; None disables it.

    Examples
    --------
    ::

        aggregator = Aggregator(ServedRun(name="run", incarnation="a1", clients=manifest.roster, ...))
        address = aggregator.start("127.0.0.1:0")
        aggregator.wait_for(manifest.roster, timeout_s=60)
        answers = aggregator.exchange(call)
        aggregator.close(call.key)
        aggregator.stop(finished=True)
    """

    def __init__(
        self,
        run: ServedRun,
        *,
        protection: Protection | None = None,
        audit: Audit | None = None,
        monitor: Monitor | None = None,
        notices: ProgressPublisher | None = None,
        control: Control | None = None,
        models: Personalization | None = None,
        say: Callable[[str], None] | None = None,
        health: str | None = None,
    ) -> None:
        self._run = run
        self._protection = protection or Protection()
        self._audit = audit or Audit()
        self._monitor = (notices.monitor if notices is not None else monitor) or Monitor()
        self._notices = notices
        self._control = control
        self._models = models
        self._say = say
        self._health = health
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._most = connections()
        self._traffic = ByteCount()
        self._connected = ConnectedWorkers(run.clients)
        self._dispatcher = Dispatcher(run, self._publish, self._report)
        admission = Admission(run, self._connected.index, self._dispatcher)
        self._streams = WorkerStreams(run, admission, self._dispatcher, self._traffic, self._entered)
        is_open = run.presence is not None
        self._status = LiveStatus(self._monitor, self._dispatcher, self._connected, self._traffic, is_open)
        self._told: Standing | None = None  # what the members were sent last
        self._monitor.tell_members = self.tell_members

    # ---- used by the round loop, in its own thread

    def start_new_session(self, incarnation: str, experiment: str) -> None:
        """Switch to another incarnation and Welcome; connected workers reconnect to receive it.

        All conversations must be closed first.
        """

        def renamed() -> None:
            self._streams.change(replace(self._run, incarnation=incarnation, experiment=experiment))
            self._dispatcher.rename(incarnation)

        self._post(renamed)

    def start(self, address: str) -> str:
        """Serve on ``host:port`` (port 0: any free port) and return the bound address.

        Raise ExperimentError if the address is invalid, the port is taken, the address cannot be bound, or an
        unprotected aggregator would be reachable from other machines.
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

    def shutdown_workers(self, finished: bool = False) -> None:
        """End all workers' streams; waiting exchanges end with all rows lost. Idempotent.

        Parameters
        ----------
        finished
            Notify the workers, including those that connect later, that the run is over, so that they exit instead of
            reconnecting.
        """
        self._post(self._dismiss, finished)

    def drain(self, resumed: bool) -> None:
        """Wait, after :meth:`shutdown_workers`, for workers that have not been notified of the end of the run yet.

        A worker that has lost its connection reconnects within ``LINGER_S``. The wait ends that long after the last
        disconnect of a worker that has not returned. After a resume, workers of the previous aggregator process may
        also connect, so the wait lasts at least that long after the start.

        Parameters
        ----------
        resumed
            True if workers of an earlier aggregator process may connect.
        """
        self._connected.drain(resumed)

    def tell_members(self) -> None:
        """Send the standing of the federation to the workers, before anything that is sent to them later."""
        self._post(self._tell_members)

    def stop(self, finished: bool = False) -> None:
        """Shut down the workers, end all streams and free the port. Idempotent."""
        if self._thread is None or self._stopping is None:
            return
        self.shutdown_workers(finished)
        self._post(self._stopping.set)
        self._thread.join()

    @property
    def traffic(self) -> Traffic:
        """Bytes of serialized frames since the start: ``up`` from workers, ``down`` to them."""
        return Traffic(up=self._traffic.up, down=self._traffic.down)

    @property
    def refusals(self) -> Refusals:
        """Refused or dropped parts since the start, by kind (``fedloom.transport.frames.Refusal``)."""
        return self._dispatcher.refusals

    @property
    def silence(self) -> Silence:
        """Clients that missed a deadline."""
        return self._dispatcher.silence

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the connected workers, by name."""
        return self._connected.workers()

    def activity(self) -> Activity:
        """Return the state of the federation; callable from any thread.

        Raise RuntimeError if the aggregator is not started, or has been stopped.
        """
        if self._loop is None or not self._alive():
            raise RuntimeError("the aggregator is not started, or has been stopped")

        async def snapshot() -> Activity:
            return self._status.activity()

        return asyncio.run_coroutine_threadsafe(snapshot(), self._loop).result(ALIVE_S)

    def unserved(self, clients: Iterable[str]) -> tuple[str, ...]:
        """Return the given clients that no connected worker may serve, in the given order."""
        return self._connected.unserved(clients)

    def wait_for(self, clients: Collection[str], timeout_s: float, workers: int = 1) -> None:
        """Wait until a connected worker may serve each client and at least ``workers`` workers are connected.

        Raise QuorumError if this is not so after ``timeout_s`` seconds (the error names the clients), or if the
        aggregator is stopped.
        """
        self._connected.wait_for(clients, timeout_s, workers)

    def exchange(self, call: Call) -> list[Message | Lost]:
        """Carry one exchange: send, wait, and return one checked answer per row (see ``Transport``)."""
        _check_sendable(call)
        exchange = Exchange(call)
        if not self._post(self._dispatcher.open, exchange):
            return [Lost(STOPPED)] * len(call.rows)
        try:
            answers = self._collect(exchange)
        finally:
            self._post(self._dispatcher.finish, exchange)
        if len(answers) < len(call.rows) and self._alive():
            exchange.finished.wait(ALIVE_S)  # silent clients are recorded before the next cohort is drawn
        first = next((answer for answer in answers.values() if isinstance(answer, Message)), None)  # all have one shape
        if first is not None and first.client_bytes() >= SPOOLED_BYTES:
            return_freed_memory()  # of frames
        late = Lost(f"timeout: no answer after {call.deadline_s} s" if self._alive() else STOPPED)
        return [answers.get(row, late) for row in call.rows]

    def _collect(self, exchange: Exchange) -> dict[int, Message | Lost]:
        """Return the checked answers by row, once all have arrived, the deadline has passed or the loop has ended."""
        answers: dict[int, Message | Lost] = {}
        while len(answers) < len(exchange.call.rows):
            remaining = exchange.remaining_s()
            try:
                items = [exchange.inbox.get(timeout=ALIVE_S if remaining is None else min(remaining, ALIVE_S))]
            except queue.Empty:
                if (remaining is not None and remaining <= ALIVE_S) or not self._alive():
                    break
                continue
            while not exchange.inbox.empty():
                items.append(exchange.inbox.get_nowait())
            replies: dict[Assembler, dict[int, Arrived]] = {}
            for item in items:
                if isinstance(item, Exception):
                    raise item
                row, outcome = item
                if isinstance(outcome, Lost):
                    answers[row] = outcome
                else:
                    replies.setdefault(outcome.assembler, {})[row] = outcome
            for reply in replies.values():
                answers |= self._decode(exchange, reply)
        return answers

    def close(self, key: ConversationKey) -> None:
        """End a conversation and notify the workers that hold rows of it. Idempotent."""
        self._post(self._dispatcher.close, key)

    def _decode(self, exchange: Exchange, reply: Mapping[int, Arrived]) -> Mapping[int, Message | Lost]:
        """Return the checked answers of rows of one reply: checked together if possible, which is faster."""
        first = next(iter(reply.values()))
        if len(reply) > 1 and first.assembler.is_whole:
            with suppress(WireError):
                together = first.assembler.message(first.cls)
                if non_finite(together) is None:
                    messages = together.split(first.assembler.specs[0].shape[0])
                    return {row: messages[arrived.place] for row, arrived in reply.items()}
        return {row: self._decode_row(exchange, row, arrived) for row, arrived in reply.items()}

    def _decode_row(self, exchange: Exchange, row: int, arrived: Arrived) -> Message | Lost:
        try:
            message = arrived.message()
            if (reason := non_finite(message)) is not None:
                raise WireError(Refusal.NON_FINITE, reason)
        except WireError as error:
            return Lost(self._dispatcher.receiver.refuse(error, exchange, row, arrived.worker))
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
        if self._models is not None:
            await self._models.begin()
        options = (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", self._most))
        services, protection = self._services(), self._protection
        server = await listening(address, services, protection, self._audit, options, self._report, self._health)
        started.set_result(server.address)
        log.debug("serving on %s", server.address)
        watchers = self._watch_connections(), self._watch_rows(), self._watch_standing()
        watching = [asyncio.create_task(watcher) for watcher in watchers]
        await self._stopping.wait()
        for task in watching:
            task.cancel()
        await server.stop(1.0)
        if self._models is not None:
            await self._models.end()
        # gRPC does not wait for handlers to finish, and prints a traceback for those that are cancelled then.
        if remaining := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(remaining, timeout=1.0)

    def _services(self) -> dict[str, dict[str, Any]]:
        # Frames are read and written as bytes, so that an invalid frame ends its stream with our status and the traffic
        # counts exactly the bytes sent.
        services: dict[str, dict[str, Any]] = {
            SERVICE: {METHOD: grpc.stream_stream_rpc_method_handler(self._streams.join)}
        }
        if self._notices is not None or self._control is not None:
            status = self._status
            service = ControlService(
                status.activity, status.roster_clients, self._announce, self._control, publisher=self._notices
            )
            services[CONTROL] = service.methods()
        if self._models is not None:
            services[MODELS] = self._models.handlers
        return services

    def _entered(self, name: str) -> None:
        """Send a worker that has joined the standing of the federation."""
        self._connected.learned(name)
        for link in self._dispatcher.links():
            if link.name == name:
                link.outbox.put_part(Standing, _standing_part(Standing.from_activity(self._status.activity())))

    def _tell_members(self) -> None:
        """Send the standing of the federation to the connected workers if it has changed."""
        now = Standing.from_activity(self._status.activity())
        if now != self._told:
            self._told, part = now, _standing_part(now)
            for link in self._dispatcher.links():
                link.outbox.put_part(Standing, part)

    async def _watch_standing(self) -> None:
        """Tell the members periodically."""
        while True:
            await asyncio.sleep(STANDING_EVERY_S)
            self._tell_members()

    def _dismiss(self, finished: bool) -> None:
        self._tell_members()
        self._connected.end()
        if self._run.presence is not None:
            self._run.presence.end()
        self._dispatcher.stop(finished)

    async def _watch_rows(self) -> None:
        """Check periodically for stalled rows."""
        while True:
            await asyncio.sleep(ROWS_EVERY_S)
            self._dispatcher.ask_others()

    async def _watch_connections(self) -> None:
        """Report when the connection limit is reached, which gRPC itself does not report."""
        others, full = _sockets(), False
        while True:
            await asyncio.sleep(CONNECTIONS_EVERY_S)
            was, full = full, _sockets() - others >= self._most
            if full and not was:
                self._report(
                    f"{self._most} connections are open, which is the limit: further workers cannot join until some "
                    "are closed"
                )

    def _publish(self, joined: WorkerInfo | None, left: WorkerInfo | None) -> None:
        self._connected.change(joined, left)
        if self._run.presence is not None:
            self._run.presence.change(() if joined is None else joined.members, () if left is None else left.members)

    def _report(self, text: str) -> None:
        """Report the reason why the federation waits, or a problem."""
        self._monitor.say(text)
        self._announce(text)

    def _announce(self, text: str) -> None:
        log.warning("%s", text)
        if self._notices is not None:
            self._notices.say(text)
        if self._say is not None:
            self._say(text)


def _standing_part(standing: Standing) -> wire.AggregatorPart:
    return wire.AggregatorPart(standing=wire.Standing(standing=standing.to_json()))


def _check_sendable(call: Call) -> None:
    encode(call.message)  # a dtype that the wire cannot carry is the caller's error: raise in its thread
    begin = sum(len(client.encode()) + 2 for client in call.clients) + 6 * len(call.rows)
    if begin > FRAME_BYTES // 2:
        raise ExperimentError(
            f"a cohort of {len(call.rows)} clients is too large for one conversation over the wire: ids and rows take "
            f"{begin} bytes, and at most {FRAME_BYTES // 2} fit"
        )


def _sockets() -> int:
    """Return the number of sockets that this process has open."""
    return sum(_is_socket(int(entry.name)) for entry in Path("/dev/fd").iterdir())


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # the directory's own descriptor
        return False
