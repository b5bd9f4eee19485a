"""Client for observing and controlling a federation (docs/wire.md). Does not import torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import grpc
from pydantic import TypeAdapter, ValidationError

from fedloom.core.words import printable, shortened
from fedloom.errors import AbandonedError, ExperimentError, FedloomError, RefusedError, StorageError
from fedloom.federation.activity import Activity, Phase, RosterClient
from fedloom.security.options import Credentials
from fedloom.transport.dial import CHANNEL_OPTIONS, REFUSALS, ServerConnection, connection_failure, hint
from fedloom.transport.wire import control_pb2 as wire

CONTROL = "fedloom.v1.Control"
STATUS, WATCH, CLIENTS, PAUSE, RESUME, STOP = "Status", "Watch", "Clients", "Pause", "Resume", "Stop"

ENDS: frozenset[Phase] = frozenset(("finished", "failed"))
"""Phases in which an aggregator's work is over."""

ANSWER_S = 10.0
"""Timeout of an answer."""

RETRY_INTERVAL_S = 0.1
"""Interval between attempts to reach an aggregator that is to be watched."""

_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # gRPC's default is two minutes
)
T = TypeVar("T")

_ACTIVITY = TypeAdapter(Activity)
_CLIENT = TypeAdapter(RosterClient)


def to_wire(activity: Activity) -> str:
    """Return a snapshot as JSON."""
    return json.dumps(asdict(activity))


def from_wire(text: str) -> Activity:
    """Parse a snapshot; unknown fields are ignored.

    Raise RefusedError if it has values, such as phases, that this version does not support.
    """
    activity = _parsed(_ACTIVITY, text)
    return replace(activity, run=printable(activity.run), message=printable(activity.message, keep="\n"))


def _parsed(adapter: TypeAdapter[T], text: str) -> T:
    """Parse JSON of an aggregator; raise RefusedError if this version does not support it."""
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"])) or "content"
        raise RefusedError(
            f"the aggregator's status has the {key} {shortened(str(wrong['input']))}, which this version of fedloom "
            "does not support",
            hint="install the same version of fedloom on both sides",
        ) from None


class ControlClient:
    """Control client for one aggregator; created by :func:`dialled`.

    Every method raises these errors.

    Raises
    ------
    AbandonedError
        If no aggregator answers.
    RefusedError
        If the aggregator denies the call, or one side cannot verify the other.
    ExperimentError
        If the run has ended, so that there is nothing to control.
    StorageError
        If the aggregator could not record the request.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self._connection, self._address, self._channel = connection, connection.address, connection.channel

    def status(self) -> Activity:
        """Return the state of the federation."""
        return from_wire(self._call(STATUS, wire.StatusRequest(), wire.StatusResponse).activity)

    def watch(self) -> Iterator[Activity]:
        """Yield the state of the federation whenever it has changed, until the run is over (see :func:`follow`)."""
        call = self._start(self._channel.unary_stream, WATCH, wire.WatchRequest(), wire.WatchResponse, None)
        now: Activity | None = None
        try:
            for response in call:
                now = from_wire(response.activity)
                yield now
        except grpc.RpcError as error:
            if now is None or error.code() in REFUSALS:
                raise self._failure(error) from error
            raise self._broken(connection_failure(error.code(), error.details())) from error
        finally:
            call.cancel()
        if now is None or now.phase not in ENDS:
            raise self._broken("the stream ended before the run had ended")

    def _broken(self, reason: str) -> AbandonedError:
        return AbandonedError(f"watching the aggregator at {self._address}: {reason}")

    def clients(self) -> Iterator[RosterClient]:
        """Yield the clients of the roster, by id."""
        unary_stream, timeout_s = self._channel.unary_stream, 6 * ANSWER_S
        try:
            for part in self._start(unary_stream, CLIENTS, wire.ClientsRequest(), wire.ClientsResponse, timeout_s):
                for client in part.clients:
                    yield _parsed(_CLIENT, client)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def pause(self) -> tuple[bool, Activity]:
        """Pause the rounds after the current one; return whether that changes anything, and the state."""
        response = self._call(PAUSE, wire.PauseRequest(), wire.PauseResponse)
        return response.changed, from_wire(response.activity)

    def resume(self) -> tuple[bool, Activity]:
        """Resume the rounds; return whether that changes anything, and the state."""
        response = self._call(RESUME, wire.ResumeRequest(), wire.ResumeResponse)
        return response.changed, from_wire(response.activity)

    def stop(self, *, now: bool) -> Activity:
        """Stop the aggregator, after the current round or at once."""
        return from_wire(self._call(STOP, wire.StopRequest(now=now), wire.StopResponse).activity)

    def _call(self, name: str, request: Any, answer: Any) -> Any:
        try:
            return self._start(self._channel.unary_unary, name, request, answer, ANSWER_S)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def _start(self, kind: Callable[..., Any], name: str, request: Any, answer: Any, timeout_s: float | None) -> Any:
        """Start a call; ``kind`` is the method of the channel for calls with one answer, or with a stream of them."""
        method = kind(
            f"/{CONTROL}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return method(request, metadata=self._connection.metadata, timeout=timeout_s)

    def _failure(self, error: grpc.RpcError) -> FedloomError:
        code, details = error.code(), error.details()
        if code in REFUSALS:
            return RefusedError(f"{self._address}: {connection_failure(code, details)}", hint=hint(code))
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return ExperimentError(f"{self._address}: {details}")
        if code is grpc.StatusCode.ABORTED:
            return StorageError(f"{self._address}: {details}")
        connection = self._connection
        if reason := connection.distrust(code, details) or connection.closed_after_handshake(code, details):
            return RefusedError(f"the aggregator at {self._address}: {reason}", hint="see docs/security.md")
        return AbandonedError(
            f"no aggregator answers at {self._address}: "
            f"{connection.perhaps_tls(code, details) or connection_failure(code, details)}",
            hint="if no aggregator runs, read the run's folder or URL: fedloom status RUN",
        )


@contextmanager
def dialled(address: str, credentials: Credentials | None = None) -> Iterator[ControlClient]:
    """Yield a client for the aggregator at ``host:port``; nothing is sent to it yet.

    Parameters and errors are those of :class:`ServerConnection`.
    """
    connection = ServerConnection(address, credentials, _OPTIONS, sync=True)
    with connection.channel:
        yield ControlClient(connection)


def follow(address: str, *, connect_s: float, credentials: Credentials | None = None) -> Iterator[Activity]:
    """Watch the run of an aggregator to its end.

    The first :class:`Activity` is yielded at once, and another whenever something has changed, at most a few per
    second; each evaluation (``measured``) has its own. The iterator ends after one whose phase is ``finished`` or
    ``failed``. Closing it stops watching.

    Parameters
    ----------
    address
        ``host:port`` of the aggregator.
    connect_s
        Seconds in which an aggregator must be reached.
    credentials
        As for :func:`dialled`.

    Raises
    ------
    AbandonedError
        If no aggregator is reached in time, or the connection breaks: it may be restarting.
    RefusedError
        If the aggregator does not allow watching, or one side cannot verify the other.
    ExperimentError
        If the address is invalid, or a token would be sent in plaintext to another machine.
    """
    ends = time.monotonic() + connect_s
    was_reached = False
    with dialled(address, credentials) as client:
        while True:
            try:
                for now in client.watch():
                    was_reached = True
                    yield now
            except AbandonedError:
                if was_reached or time.monotonic() > ends:
                    raise
                time.sleep(RETRY_INTERVAL_S)
            else:
                return
