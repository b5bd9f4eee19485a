"""Worker side of the wire protocol: receives requests and streams answers back (docs/wire.md).

The stream lives on an event loop in its own thread (``worker_connection.py``). All work of a session, and thus all
torch work, happens in the thread that called :func:`serve`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from fedloom.core import tracing
from fedloom.core.memory import SPOOLED_BYTES, return_freed_memory
from fedloom.errors import DataError
from fedloom.federation.states import Versions
from fedloom.federation.transport import ConversationKey, Declined, Gate, Lost, MissingConversation
from fedloom.federation.worker_record import WorkerRecord
from fedloom.messages import Message
from fedloom.security.options import Credentials
from fedloom.transport.frames import WireError
from fedloom.transport.limits import Bandwidth
from fedloom.transport.stream import Introduction, Joined, states_from_wire
from fedloom.transport.worker_connection import Close, Finished, WorkerConnection
from fedloom.transport.worker_requests import WorkerRequest

log = logging.getLogger(__name__)

NOTICE_S = 0.2  # how soon a stop event is noticed while idle


class Session(Protocol):
    """Clients' side of all conversations with one incarnation of the aggregator."""

    @property
    def vocabulary(self) -> Mapping[str, type[Message]]:
        """Messages that may be sent to clients, by class name."""

    def answer(
        self,
        key: ConversationKey,
        exchange: int,
        rows: Sequence[int],
        clients: Sequence[str],
        message: Message,
        states: Sequence[Versions] = (),
    ) -> Iterator[tuple[int, Message | Lost]]:
        """Yield each row's answer as soon as it is ready: (position in the cohort, message of one row or Lost).

        If the last exchange of a row is requested again, its answer is yielded again without recomputation. An opening
        (exchange 0) that is not the last exchange of a row restarts the row.

        Raise MissingConversation before any work, if rows have not taken part in the previous exchange here.
        """

    def close(self, key: ConversationKey) -> None:
        """End a conversation. Idempotent."""


def serve(
    address: str,
    introduction: Introduction,
    *,
    make_session: Callable[[Joined], Session],
    stop: threading.Event,
    reconnect_s: float = 60.0,
    credentials: Credentials | None = None,
    bandwidth: Bandwidth | None = None,
    gate: Gate | None = None,
    record: WorkerRecord | None = None,
    health: str | None = None,
) -> bool:
    """Serve clients until the run is over or ``stop`` is set; return whether the run is over.

    Parameters
    ----------
    address
        ``host:port`` of the aggregator.
    introduction
        Sent to the aggregator on joining.
    make_session
        Called in this thread when an aggregator, or a new incarnation of it, has admitted us. A session survives a
        broken connection, but not the aggregator's process. If it raises Declined, the
        worker tells the aggregator, and connects again once the ``gate`` is open.
    stop
        Set by a signal handler to leave at once, without finishing any work.
    reconnect_s
        Seconds to keep trying to reach a lost aggregator; infinity means forever.
    credentials
        Credentials to connect with; without them, the connection is plaintext and anonymous.
    bandwidth
        Bandwidth limit; None for no limit.
    gate
        Conditions of the member under which the worker is connected; None for none.
    record
        Record of what happens; in another thread, it is told the standing of the federation.
    health
        ``host:port`` on which probes are answered, in plaintext; None disables them.

    Raises
    ------
    RefusedError
        If the aggregator refuses our protocol, package or algorithm version, or our identity. If either side cannot
        verify the other: at once if the aggregator has never admitted us, otherwise after ``reconnect_s`` seconds,
        because certificates may be about to be renewed.
    ExperimentError
        If a token would be sent in plaintext to another machine.
    DataError
        If we may serve a client that the run does not have.
    AbandonedError
        If the aggregator cannot be reached for ``reconnect_s`` seconds.
    Exception
        Any other error that ended the stream's thread, such as lack of memory.
    """
    credentials, record = credentials or Credentials(), record or WorkerRecord()
    connection = WorkerConnection(address, introduction, reconnect_s, credentials, bandwidth, gate, record, health)
    connection.start()
    try:
        return _work(connection, make_session, stop)
    finally:
        connection.stop()


def _work(connection: WorkerConnection, make_session: Callable[[Joined], Session], stop: threading.Event) -> bool:
    incarnation = ""
    session: Session | None = None
    while not stop.is_set():
        try:
            event = connection.events.get(timeout=NOTICE_S)
        except queue.Empty:
            continue
        match event:
            case BaseException():
                raise event
            case Finished():
                return True
            case Joined() if session is None or event.incarnation != incarnation:
                session, incarnation = None, event.incarnation
                try:
                    session = make_session(event)
                except Declined as declined:
                    connection.decline(str(declined))
            case WorkerRequest() if session is not None and event.incarnation == incarnation:
                with tracing.within(event.envelope.trace):
                    if not _answer(connection, session, event, stop) and connection.is_over(event):
                        connection.too_late(event)
            case Close():
                if session is not None:
                    session.close(event.key)
                connection.closed.discard(event.key)
    return False


def _answer(connection: WorkerConnection, session: Session, request: WorkerRequest, stop: threading.Event) -> bool:
    """Compute a request's answers, sending each as soon as it is ready; return False if it was no longer needed."""
    if _pointless(connection, request, stop):
        return False
    rows, clients = list(request.envelope.rows), list(request.envelope.clients)
    try:
        message = request.message(session.vocabulary)
        if message.client_bytes() >= SPOOLED_BYTES:
            return_freed_memory()  # of frames, and of what was computed before
    except (WireError, DataError) as error:
        reason = f"the worker cannot read the request: {error}" if isinstance(error, WireError) else str(error)
        refused = {"client": ", ".join(clients), "data": {"event": "refused"}}
        log.warning("clients %s are not answered: %s", ", ".join(clients), reason, extra=refused)
        for row, client in zip(rows, clients, strict=True):
            connection.reply(request, row, client, Lost(reason))
        return True
    positions = list(range(len(rows)))
    while positions:
        try:
            return _answer_some(connection, session, request, message, positions, stop)
        except MissingConversation as missing:
            incomplete = [i for i in positions if rows[i] in missing.rows]
            if not incomplete:
                raise
            connection.missing(request, [rows[i] for i in incomplete])
            positions = [i for i in positions if i not in incomplete]
    return True


def _answer_some(
    connection: WorkerConnection,
    session: Session,
    request: WorkerRequest,
    message: Message,
    positions: list[int],
    stop: threading.Event,
) -> bool:
    """Answer the rows at these positions of a request; return False if it was no longer needed."""
    envelope = request.envelope
    client = dict(zip(envelope.rows, envelope.clients, strict=True))
    connection.record.answering(request.key)
    answers = session.answer(
        request.key,
        envelope.exchange,
        [envelope.rows[i] for i in positions],
        [envelope.clients[i] for i in positions],
        message.select(positions),
        [states_from_wire(envelope.states[i]) for i in positions] if envelope.states else (),
    )
    try:
        for row, answer in answers:
            if not envelope.replay:
                connection.reply(request, row, client[row], answer)
            if _pointless(connection, request, stop):
                return False
        connection.flush()
        return True
    finally:
        close = getattr(answers, "close", None)
        if close is not None:
            close()
        connection.record.answering(None)


def _pointless(connection: WorkerConnection, request: WorkerRequest, stop: threading.Event) -> bool:
    """Return whether the rest of a request is pointless: stopping, closed, expired, or from another aggregator."""
    return stop.is_set() or connection.is_over(request) or connection.incarnation != request.incarnation
