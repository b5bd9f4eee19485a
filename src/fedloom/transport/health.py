"""A port for probes: gRPC health in plaintext and nothing else, beside a port that asks for certificates."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from fedloom.errors import ExperimentError, argument
from fedloom.transport.address import split_address

CONNECTIONS = 32
FRAME_BYTES = 1024


async def probed(address: str, state: Any) -> Any:
    """Serve what a health servicer says on ``host:port``, on this event loop: it answers as long as the loop runs.

    Parameters
    ----------
    state
        The servicer (``grpc_health.v1.health.aio``), that of the other port.

    Returns
    -------
    grpc.aio.Server
        Started; stop it with the other.

    Raises
    ------
    ExperimentError
        If it is no address, the port is taken or the address cannot be bound.
    """
    _, port = split_address(address, what=argument("health"), lowest=0)
    options = (
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS),
        ("grpc.max_receive_message_length", FRAME_BYTES),
    )
    server = grpc.aio.server(options=options)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if bound == 0:
        await server.stop(None)
        raise ExperimentError(
            f"cannot serve on {address}: port {port} is taken or the address is not of this machine",
            hint=f"choose another one with {argument('health')} HOST:PORT",
        )
    await server.start()
    return server
