"""Progress of a run, watched from another process over gRPC (docs/wire.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from fedloom.errors import RefusedError
from fedloom.transport import dial
from fedloom.transport.address import split_address
from fedloom.transport.failures import REFUSALS, described, hint
from fedloom.transport.stream import CHANNEL_OPTIONS, OBSERVATION, WATCH
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.trust.options import ClientCredentials, Credentials
from fedloom.words import DEEPEST, parsed_json, printable

State = Literal["waiting", "training", "evaluating", "finished", "failed"]

STATES: dict[State, wire.State] = {
    "waiting": wire.STATE_WAITING,
    "training": wire.STATE_TRAINING,
    "evaluating": wire.STATE_EVALUATING,
    "finished": wire.STATE_FINISHED,
    "failed": wire.STATE_FAILED,
}
ENDS: frozenset[State] = frozenset(("finished", "failed"))
"""Final states."""

ANSWER_S, RETRY_INTERVAL_S = 2.0, 0.1
"""Timeout for learning why there is no connection, and interval between attempts."""

DIALLING = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # gRPC's default is two minutes
)


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes
    ----------
    run
        Name of the run.
    state
        ``waiting`` (for workers), ``training`` or ``evaluating``; at the end ``finished`` or ``failed``.
    round, rounds
        The last completed round, and the number of rounds to run.
    workers
        Number of connected workers.
    clients_unserved
        Clients that no connected worker may serve.
    evaluated
        The new line of ``metrics.jsonl``, if there is one.
    message
        Message for a person: what the run waits for, why an attempt or the run failed. May be empty.
    """

    run: str
    state: State
    round: int
    rounds: int
    workers: int
    clients_unserved: int
    evaluated: dict[str, Any] | None = None
    message: str = ""


def follow(address: str, *, connect_s: float, credentials: Credentials | None = None) -> Iterator[Progress]:
    """Watch the run of an aggregator to its end.

    The first :class:`Progress` comes at once, and another whenever something has changed, at most a few per second. The
    iterator ends after one whose state is ``finished`` or ``failed``. Closing it stops watching.

    Parameters
    ----------
    address
        ``host:port`` of the aggregator.
    connect_s
        Timeout for connecting, in seconds.
    credentials
        Credentials to connect with; without them, the connection is plaintext and anonymous.

    Raises
    ------
    ConnectionError
        If no aggregator is reached within ``connect_s`` seconds, or the connection breaks: it may be restarting.
    RefusedError
        If the server does not allow watching, or one side cannot verify the other.
    ExperimentError
        If a token would be sent in plaintext to another machine.
    """
    shown = (credentials or Credentials()).show(split_address(address, what="the aggregator", lowest=1)[0])
    with dial.channel(address, shown, (*CHANNEL_OPTIONS, *DIALLING), sync=True) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=connect_s)
        except grpc.FutureTimeoutError:
            if distrust := _distrust(channel, address, shown):
                raise RefusedError(f"the aggregator at {address}: {distrust}", hint="see docs/security.md") from None
            raise ConnectionError(f"no aggregator at {address} within {connect_s:g} s") from None
        watch = channel.unary_stream(
            f"/{OBSERVATION}/{WATCH}",
            request_serializer=wire.WatchRequest.SerializeToString,
            response_deserializer=wire.Progress.FromString,
        )
        call = watch(wire.WatchRequest(), metadata=dial.metadata(shown))
        progress: Progress | None = None
        try:
            for told in call:
                before, progress = progress, from_wire(told)
                if progress != before:  # an unchanged one is a heartbeat
                    yield progress
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in REFUSALS:
                raise RefusedError(
                    f"{address} does not let itself be watched: {described(code, details)}", hint=hint(code)
                ) from error
            raise ConnectionError(f"watching the aggregator at {address}: {described(code, details)}") from error
        finally:
            call.cancel()
    if progress is None or progress.state not in ENDS:
        raise ConnectionError(f"the aggregator at {address} ended the stream before the run had ended")


def to_wire(progress: Progress) -> wire.Progress:
    """Convert the progress to its wire format."""
    evaluated = None if progress.evaluated is None else json.dumps(progress.evaluated, ensure_ascii=False)
    return wire.Progress(
        run=progress.run,
        state=STATES[progress.state],
        round=progress.round,
        rounds=progress.rounds,
        workers=progress.workers,
        clients_unserved=progress.clients_unserved,
        evaluated=evaluated,
        message=progress.message,
    )


def from_wire(told: wire.Progress) -> Progress:
    """Parse the progress.

    Raises
    ------
    RefusedError
        If the state is one of another version, which this one does not know.
    """
    states = {number: state for state, number in STATES.items()}
    if told.state not in states:
        raise RefusedError(
            f"the aggregator is in state {told.state}, which this fedloom does not know",
            hint="install the same version of fedloom on both sides",
        )
    return Progress(
        run=printable(told.run),
        state=states[told.state],
        round=told.round,
        rounds=told.rounds,
        workers=told.workers,
        clients_unserved=told.clients_unserved,
        evaluated=_evaluated(told.evaluated) if told.HasField("evaluated") else None,
        message=printable(told.message, keep="\n"),
    )


def _evaluated(text: str) -> Any:
    """Return the statistics of the last evaluation."""
    try:
        return parsed_json(text, DEEPEST)
    except ValueError as error:
        raise RefusedError(
            f"the aggregator's statistics are not JSON that can be read: {printable(str(error), 300)}"
        ) from error


def _distrust(channel: Any, address: str, shown: ClientCredentials) -> str | None:
    """Return why one side rejected the other, if that prevents the connection: a call that does not wait reports it."""
    if shown.ca is None:
        return None
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:  # each address of the host reports its own reason in turn
        try:
            channel.unary_unary(f"/{OBSERVATION}/{WATCH}")(b"", timeout=ANSWER_S)
        except grpc.RpcError as error:
            found = error.code(), error.details()
            if reason := dial.distrust(address, shown, *found) or dial.closed_after_handshake(shown, *found):
                return reason
        time.sleep(RETRY_INTERVAL_S)
    return None
