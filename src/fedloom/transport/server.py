"""What every gRPC server of FedLoom has: an address, TLS, a gate before all calls, health and reflection."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from fedloom.errors import ExperimentError, argument
from fedloom.transport.address import split_address
from fedloom.transport.gate import Gate, connection_age, server_credentials
from fedloom.transport.health import Health, Probes, probed
from fedloom.transport.limits import Sparing
from fedloom.trust.options import Protection

logging.getLogger("grpc._cython.cygrpc").addFilter(Sparing())
"""gRPC's own: it shows a traceback of each health check, and of each call where there is no gate, that is garbage."""


@dataclass(frozen=True)
class Listening:
    """A server that has started: where, and what says so to probes."""

    server: Any
    health: Health
    address: str
    probes: Probes | None = None

    async def stop(self, grace_s: float) -> None:
        """Tell probes, take no more calls, and end those that are open after so many seconds."""
        self.health.shut_down()
        await self.server.stop(grace_s)
        if self.probes is not None:
            await self.probes.stop()


async def listening(
    address: str,
    services: Mapping[str, Mapping[str, Any]],
    protection: Protection,
    gate: Gate | None,
    options: Sequence[tuple[str, Any]],
    health_address: str | None = None,
) -> Listening:
    """Serve on ``host:port`` (port 0: any free one).

    Parameters
    ----------
    services
        The handlers of each service, by method.
    gate
        Lets calls in; None: everyone may call, and may ask what there is.
    health_address
        ``host:port`` where health is served in plaintext, and nothing else; None: nowhere.

    Raises
    ------
    ExperimentError
        If it is no address, the port is taken or the address cannot be bound; if others would reach what is not
        protected.
    """
    host, port = split_address(address, what="the address to serve on", lowest=0)
    protection.check(host)
    age = () if protection.tls is None else connection_age()
    server = grpc.aio.server(options=(*options, *age), interceptors=[] if gate is None else [gate])
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
    )
    state = Health()
    server.add_generic_rpc_handlers([state.handlers])
    if gate is None:  # to know what there is helps nobody who is known
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if protection.tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, server_credentials(protection.tls))
    except RuntimeError:
        bound = 0
    if bound == 0:
        await server.stop(None)
        raise ExperimentError(
            f"cannot serve on {address}: port {port} is taken or the address is not of this machine",
            hint=f"choose another one with {argument('listen')} HOST:PORT (port 0: any free one)",
        )
    state.serve(*services)
    await server.start()
    try:
        probes = None if health_address is None else await probed(health_address, state)
    except ExperimentError:
        await server.stop(None)
        raise
    return Listening(server, state, f"{host}:{bound}", probes)
