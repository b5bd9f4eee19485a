"""Watching a run from another process: how far it is, as the aggregator tells it over gRPC (docs/wire.md)."""

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
from fedloom.trust.options import Credentials, Shown
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
"""States after which there is no other."""

ANSWER_S, AGAIN_S = 2.0, 0.1
"""How long it may take to say why there is no connection, and how soon that is asked again."""

DIALLING = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # gRPC's own is two minutes
)


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes
    ----------
    run
        Its name.
    state
        ``waiting`` (for workers), ``training``, ``evaluating``; at last ``finished`` or ``failed``.
    round, rounds
        The last that is done, and how many there are to be.
    workers
        How many are connected.
    clients_unserved
        Clients that no connected worker may serve.
    evaluated
        The new line of ``metrics.jsonl``, where there is one.
    message
        What a person should read: what is waited for, why an attempt or the run failed. Empty if there is nothing.
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

    The first :class:`Progress` comes at once; one more whenever something has changed, a few each second at most.
    The iterator ends after one whose state is ``finished`` or ``failed``. Closing it stops watching.

    Parameters
    ----------
    address
        ``host:port`` of the aggregator.
    connect_s
        How long it may take until there is a connection.
    credentials
        What it is dialled with; without, in plaintext and as nobody.

    Raises
    ------
    ConnectionError
        If there is no aggregator there within ``connect_s`` seconds, or the connection breaks: it may be restarting.
    RefusedError
        If what is there does not let itself be watched, or one side does not believe the other.
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
                if progress != before:  # the same again says that the aggregator is there
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
    """Write how far a run is."""
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
    """Read how far a run is.

    Raises
    ------
    RefusedError
        If it is of another version, which has states that this one does not know.
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


def _distrust(channel: Any, address: str, shown: Shown) -> str | None:
    """Why there is no connection, if it is that one side does not believe the other: a call that does not wait says."""
    if shown.ca is None:
        return None
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:  # of a host's addresses, each in turn says why
        try:
            channel.unary_unary(f"/{OBSERVATION}/{WATCH}")(b"", timeout=ANSWER_S)
        except grpc.RpcError as error:
            found = error.code(), error.details()
            if reason := dial.distrust(address, shown, *found) or dial.closed_after_handshake(shown, *found):
                return reason
        time.sleep(AGAIN_S)
    return None
