"""Control service of the aggregator: authorizes, records and answers the calls of ``fedloom.transport.control``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

import grpc

from fedloom.errors import FedloomError
from fedloom.federation.activity import OVER, Activity, RosterClient
from fedloom.federation.control import Control
from fedloom.transport.control import CLIENTS, PAUSE, RESUME, STATUS, STOP, clients_to_wire, to_wire
from fedloom.transport.gate import PEER, host_of
from fedloom.transport.wire import control_pb2 as wire
from fedloom.trust.options import is_loopback

log = logging.getLogger("fedloom.transport.aggregator")

T = TypeVar("T")

AT_ONCE = 500
"""Clients in one part of an answer."""

OPERATOR = "somebody on its machine"
"""Name of the operator where no identity is required."""


class ControlService:
    """Control service; answers on the aggregator's event loop.

    Parameters
    ----------
    control
        Requests to the round loop.
    activity, clients
        Return the state of the federation, and its roster by id.
    say
        Shows one line to a person.
    """

    def __init__(
        self,
        control: Control,
        activity: Callable[[], Activity],
        clients: Callable[[], Iterable[RosterClient]],
        say: Callable[[str], None],
    ) -> None:
        self._control = control
        self._activity = activity
        self._clients = clients
        self._say = say

    def methods(self) -> dict[str, Any]:
        """Return gRPC's handlers, by the names of the calls."""

        def unary(behaviour: Any, request: Any, answer: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(behaviour, request.FromString, answer.SerializeToString)

        return {
            STATUS: unary(self._status, wire.StatusRequest, wire.StatusResponse),
            CLIENTS: grpc.unary_stream_rpc_method_handler(
                self._list, wire.ClientsRequest.FromString, wire.ClientsResponse.SerializeToString
            ),
            PAUSE: unary(self._pause, wire.PauseRequest, wire.PauseResponse),
            RESUME: unary(self._resume, wire.ResumeRequest, wire.ResumeResponse),
            STOP: unary(self._stop, wire.StopRequest, wire.StopResponse),
        }

    async def _status(self, request: wire.StatusRequest, context: Any) -> wire.StatusResponse:
        return wire.StatusResponse(activity=to_wire(self._activity()))

    async def _list(self, request: wire.ClientsRequest, context: Any) -> None:
        clients = iter(self._clients())
        while part := list(islice(clients, AT_ONCE)):
            await context.write(clients_to_wire(part))

    async def _pause(self, request: wire.PauseRequest, context: Any) -> wire.PauseResponse:
        by = await self._operator(context, "pause")
        changed = await self._written(context, lambda: self._control.pause(by))
        if changed:
            self._say(f"rounds pause after the one under way: {by} asked for it")
        return wire.PauseResponse(changed=changed, activity=to_wire(self._activity()))

    async def _resume(self, request: wire.ResumeRequest, context: Any) -> wire.ResumeResponse:
        by = await self._operator(context, "resume")
        changed = await self._written(context, self._control.resume)
        if changed:
            self._say(f"rounds go on: {by} asked for it")
        return wire.ResumeResponse(changed=changed, activity=to_wire(self._activity()))

    async def _stop(self, request: wire.StopRequest, context: Any) -> wire.StopResponse:
        by = await self._operator(context, "stop now" if request.now else "stop")
        when = "now" if request.now else "after the round under way"
        self._say(f"the aggregator stops {when}: {by} asked for it")
        self._control.stop(request.now)
        return wire.StopResponse(activity=to_wire(self._activity()))

    async def _operator(self, context: Any, what: str) -> str:
        """Return the operator's name, recorded in the audit log; callers without identity must be on this machine."""
        activity = self._activity()
        if activity.phase in OVER:
            how = f"the run is over ({activity.phase}, round {activity.round})"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{how}: there is nothing to {what}")
        if (peer := PEER.get()) is not None:
            await self._written(context, lambda: peer.control(what))
            return peer.identity.name
        host = host_of(context.peer())
        if not is_loopback(host):
            reason = (
                "found nobody that is known; allowed: who has the role admin, or calls from the aggregator's machine"
            )
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        return OPERATOR

    @staticmethod
    async def _written(context: Any, write: Callable[[], T]) -> T:
        """Run a function that writes to storage in a thread; abort the call if it fails."""
        try:
            return await asyncio.to_thread(write)
        except FedloomError as error:
            log.error("%s", error)
            await context.abort(grpc.StatusCode.ABORTED, f"all is as before: {error.message}")
            raise AssertionError("abort raises") from None
