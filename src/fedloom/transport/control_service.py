"""Control service of the aggregator: authorizes, records and answers the calls of ``fedloom.transport.control``.

:class:`ProgressPublisher` adds to the monitor's state what watchers need: each evaluation, and messages that stay until
the next round.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import grpc

from fedloom.core.address import is_loopback
from fedloom.core.words import pluralize
from fedloom.errors import FedloomError
from fedloom.federation.activity import OVER, Activity, LastEvaluation, Phase, RosterClient
from fedloom.federation.monitor import Control, Monitor
from fedloom.runs.journal import Attempt
from fedloom.transport import stream
from fedloom.transport.control import CLIENTS, ENDS, PAUSE, RESUME, STATUS, STOP, WATCH, to_wire
from fedloom.transport.gate import PEER, host_of
from fedloom.transport.wire import control_pb2 as wire

log = logging.getLogger("fedloom.transport.aggregator")

T = TypeVar("T")

AT_ONCE = 500
"""Clients in one part of an answer."""

OPERATOR = "local operator"
"""Name of the operator where no identity is required."""

EVERY_S = 0.2
"""Minimum interval between states sent to a watcher: rounds may take milliseconds."""

WATCHERS = 256
"""Maximum number of watchers at one time; each checks for changes several times a second."""


class ProgressPublisher:
    """Progress of a run for its watchers; an observer of the round loop, and written by any thread."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._lock = threading.Lock()
        self._message = ""
        self._evaluations: list[LastEvaluation] = []
        self._encoded: tuple[Activity, wire.WatchResponse] | None = None
        self._watchers = 0
        self._unwatched_since = time.monotonic()

    def tell(self, phase: Phase, message: str = "") -> None:
        """Enter a phase; ignored once the run has ended."""
        self._message = ""
        self.monitor.enter(phase, message)

    def say(self, message: str) -> None:
        """Show a message until the next round or phase."""
        self._message = message

    def completed(self, activity: Activity) -> Activity:
        """Return a state with the message to show."""
        return activity if activity.message or activity.phase in ENDS else replace(activity, message=self._message)

    # ---- observer of the round loop

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Report a completed round."""
        self._message = ""

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Report a failed attempt."""
        self.say(f"round {attempt.round}: attempt {attempt.attempt} of {attempts} failed: {attempt.outcome}")

    def evaluating(self, round: int, count: int, clients: int) -> None:
        """Report how many clients an evaluation has measured so far."""
        self.say(f"{count} of {pluralize(clients, 'client')} measured")

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Report a line written to metrics.jsonl."""
        self._message = ""
        self._evaluations.append(LastEvaluation.from_line(line))

    # ---- watchers

    @property
    def unwatched_s(self) -> float:
        """Seconds since the last watcher left; 0 while anyone watches."""
        with self._lock:
            return 0.0 if self._watchers else time.monotonic() - self._unwatched_since

    def read_within(self, seconds: float) -> None:
        """Wait until every watcher has received the final state, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._watchers and time.monotonic() < deadline:
            time.sleep(0.02)

    async def watch(self, activity: Callable[[], Activity], context: Any) -> None:
        """Handle one watcher's stream of the states that ``activity`` returns; the first has the newest evaluation."""
        if self._watchers >= WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{WATCHERS} watchers are connected, which is the limit; retry later",
            )
        with self._lock:
            self._watchers += 1
        last_sent: Any = None
        sent_at, seen = 0.0, len(self._evaluations)
        try:
            while True:
                new, now = self._evaluations[seen:], activity()
                seen += len(new)
                for measurement in new[:-1]:
                    await context.write(self._response(replace(now, phase="evaluating", measured=measurement)))
                if (news := _news(now)) != last_sent or new or time.monotonic() - sent_at > stream.HEARTBEAT_S:
                    await context.write(self._response(replace(now, measured=new[-1]) if new else now))
                    last_sent, sent_at = news, time.monotonic()
                if now.phase in ENDS:
                    return
                await asyncio.sleep(EVERY_S)
        finally:
            with self._lock:
                self._watchers -= 1
                self._unwatched_since = time.monotonic()

    def _response(self, now: Activity) -> wire.WatchResponse:
        """Encode a state once for all watchers."""
        if self._encoded is None or self._encoded[0] is not now:
            self._encoded = now, wire.WatchResponse(activity=to_wire(now))
        return self._encoded[1]


def _news(now: Activity) -> tuple[object, ...]:
    """Return the parts of a state whose changes are sent at once: everything but rates, times and bytes."""
    rounds = now.round, now.doing, now.attempt, now.durable_round
    return now.phase, now.message, *rounds, now.paused_by, len(now.workers), now.clients.absent, now.measured


class ControlService:
    """Control service; answers on the aggregator's event loop.

    Parameters
    ----------
    activity, clients
        Return the state of the federation, and its roster by id.
    say
        Shows one line to the user.
    control
        Requests to the round loop; without it, the federation can only be observed.
    publisher
        Progress of the run; without it, the run cannot be watched.
    """

    def __init__(
        self,
        activity: Callable[[], Activity],
        clients: Callable[[], Iterable[RosterClient]],
        say: Callable[[str], None],
        control: Control | None = None,
        publisher: ProgressPublisher | None = None,
    ) -> None:
        self._control = control
        self._publisher = publisher
        self._state = activity
        self._clients = clients
        self._say = say
        self._cached: Activity | None = None
        self._cached_at = 0.0

    def methods(self) -> dict[str, Any]:
        """Return gRPC's handlers, by the names of the calls."""

        def unary(behaviour: Any, request: Any, answer: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(behaviour, request.FromString, answer.SerializeToString)

        def stream(behaviour: Any, request: Any, answer: Any) -> Any:
            return grpc.unary_stream_rpc_method_handler(behaviour, request.FromString, answer.SerializeToString)

        handlers = {
            STATUS: unary(self._status, wire.StatusRequest, wire.StatusResponse),
            CLIENTS: stream(self._list, wire.ClientsRequest, wire.ClientsResponse),
        }
        if self._publisher is not None:
            handlers[WATCH] = stream(self._watch, wire.WatchRequest, wire.WatchResponse)
        if self._control is not None:
            handlers |= {
                PAUSE: unary(partial(self._pause, self._control), wire.PauseRequest, wire.PauseResponse),
                RESUME: unary(partial(self._resume, self._control), wire.ResumeRequest, wire.ResumeResponse),
                STOP: unary(partial(self._stop, self._control), wire.StopRequest, wire.StopResponse),
            }
        return handlers

    def _activity(self) -> Activity:
        now = self._state()
        return now if self._publisher is None else self._publisher.completed(now)

    def _recent(self) -> Activity:
        """Return the state, at most half an interval old: many watchers cost little more than one."""
        if self._cached is None or time.monotonic() - self._cached_at > EVERY_S / 2:
            self._cached, self._cached_at = self._activity(), time.monotonic()
        return self._cached

    async def _watch(self, request: wire.WatchRequest, context: Any) -> None:
        assert self._publisher is not None
        if (peer := PEER.get()) is not None:
            peer.join()
        await self._publisher.watch(self._recent, context)

    async def _status(self, request: wire.StatusRequest, context: Any) -> wire.StatusResponse:
        return wire.StatusResponse(activity=to_wire(self._activity()))

    async def _list(self, request: wire.ClientsRequest, context: Any) -> None:
        roster = iter(self._clients())
        while part := list(islice(roster, AT_ONCE)):
            clients = [json.dumps(asdict(client)) for client in part]
            await context.write(wire.ClientsResponse(clients=clients))

    async def _pause(self, control: Control, request: wire.PauseRequest, context: Any) -> wire.PauseResponse:
        identity = await self._operator(context, "pause")
        is_changed = await self._written(context, lambda: control.pause(identity))
        if is_changed:
            self._say(f"rounds pause after the current one, as requested by {identity}")
        return wire.PauseResponse(changed=is_changed, activity=to_wire(self._activity()))

    async def _resume(self, control: Control, request: wire.ResumeRequest, context: Any) -> wire.ResumeResponse:
        identity = await self._operator(context, "resume")
        is_changed = await self._written(context, control.resume)
        if is_changed:
            self._say(f"rounds continue, as requested by {identity}")
        return wire.ResumeResponse(changed=is_changed, activity=to_wire(self._activity()))

    async def _stop(self, control: Control, request: wire.StopRequest, context: Any) -> wire.StopResponse:
        identity = await self._operator(context, "stop now" if request.now else "stop")
        timing = "now" if request.now else "after the current round"
        self._say(f"the aggregator stops {timing}, as requested by {identity}")
        control.stop(request.now)
        return wire.StopResponse(activity=to_wire(self._activity()))

    async def _operator(self, context: Any, action: str) -> str:
        """Return the operator's name, recorded in the audit log; callers without identity must be on this machine."""
        activity = self._activity()
        if activity.phase in OVER:
            state = f"the run is over ({activity.phase}, round {activity.round})"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{state}: there is nothing to {action}")
        if (peer := PEER.get()) is not None:
            await self._written(context, lambda: peer.control(action))
            return peer.identity.name
        if not is_loopback(host_of(context.peer())):
            reason = "an identity with role admin is required, unless the call comes from the aggregator's own machine"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        return OPERATOR

    @staticmethod
    async def _written(context: Any, write: Callable[[], T]) -> T:
        """Run a function that writes to storage in a thread; abort the call if it fails."""
        try:
            return await asyncio.to_thread(write)
        except FedloomError as error:
            log.error("%s", error)
            await context.abort(grpc.StatusCode.ABORTED, f"nothing was changed: {error.message}")
            raise AssertionError("abort raises") from None
