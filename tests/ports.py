"""Ports and addresses that are currently free."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def free_address() -> str:
    """Return 127.0.0.1 with such a port."""
    return f"127.0.0.1:{free_port()}"
