"""Local port that forwards to a pod's port through the Kubernetes API, for launchers outside of the cluster."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from types import TracebackType
from typing import Any, Self

from fedloom.cluster.api import Api

log = logging.getLogger("fedloom.cluster")

DATA, ERROR = 0, 1
"""Channels of a forwarded port; each message begins with the channel number."""
BINARY, CLOSE = 0x2, 0x8
"""Opcodes of WebSocket frames (RFC 6455, section 11.8)."""
CHUNK = 1 << 16


class Tunnel:
    """Forwarder of connections from ``address`` to a port of the current pod.

    Parameters
    ----------
    api
        Client of the cluster.
    pod
        Returns the name of the current pod; None if there is none, which closes the connection.
    port
        Port of the pod.
    """

    def __init__(self, api: Api, pod: Callable[[], str | None], port: int) -> None:
        self._api = api
        self._pod = pod
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def address(self) -> str:
        """Local address, ``host:port``."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="tunnel", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                local, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(local,), name="tunnel", daemon=True).start()

    def _forward(self, local: socket.socket) -> None:
        with local:
            try:
                pod = self._pod()
                remote = None if pod is None else self._api.forward(pod, self._port)
            except Exception as error:  # many libraries may raise here; the caller sees a closed connection
                log.debug("cannot connect to the pod: %s", error)
                return
            if remote is None:
                return
            with closing(remote):
                try:
                    _pump(local, remote)
                except Exception as error:
                    log.debug("the tunnel has ended: %s", error)


def _pump(local: socket.socket, remote: Any) -> None:
    """Copy in both directions until one side ends; in one thread, since a TLS connection must not be used by two."""
    announced: set[int] = set()
    while True:
        # Data that TLS has buffered does not show in select.
        ahead = isinstance(remote.sock, ssl.SSLSocket) and remote.sock.pending()
        ready = [remote.sock] if ahead else select.select([local, remote.sock], [], [])[0]
        if local in ready:
            data = local.recv(CHUNK)
            if not data:
                return
            remote.send_binary(bytes([DATA]) + data)
        if remote.sock in ready:
            opcode, frame = remote.recv_data_frame(control_frame=True)
            if opcode == CLOSE:
                return
            if opcode == BINARY:
                channel, content = frame.data[0], frame.data[1:]
                if channel not in announced:  # the first message of each channel is the port number
                    announced.add(channel)
                elif channel == DATA:
                    local.sendall(content)
                elif channel == ERROR:
                    log.debug("the pod's node reports: %s", content.decode(errors="replace"))
                    return
