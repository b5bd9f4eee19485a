"""A port of this machine that leads to a pod's, through the Kubernetes API: for launchers outside of the cluster."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from fedloom.cluster.api import Api

log = logging.getLogger("fedloom.cluster")

DATA, ERROR = 0, 1
"""Channels of a forwarded port; a message begins with the channel's number."""
CHUNK = 1 << 16


class Tunnel:
    """Forwards every connection to ``address`` to a port of the pod that is the right one at that moment.

    Parameters
    ----------
    api
        Of the cluster.
    pod
        Returns the name of the pod; None while there is none, and the connection is closed.
    port
        Of the pod.
    """

    def __init__(self, api: Api, pod: Callable[[], str | None], port: int) -> None:
        self._api = api
        self._pod = pod
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def address(self) -> str:
        """``host:port`` on this machine."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def __enter__(self) -> Self:
        """Begin to forward."""
        threading.Thread(target=self._accept, name="tunnel", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take no more connections."""
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
            except Exception as error:  # many libraries meet here; whoever dials sees a closed connection
                log.debug("no way to the pod: %s", error)
                return
            if remote is None:
                return
            up = threading.Thread(target=_send, args=(local, remote), name="tunnel", daemon=True)
            up.start()
            try:
                _receive(remote, local)
            finally:
                with suppress(OSError):
                    local.shutdown(socket.SHUT_RDWR)
                remote.shutdown()
                up.join()


def _send(local: socket.socket, remote: Any) -> None:
    with suppress(Exception):  # the other direction says how it ended
        while data := local.recv(CHUNK):
            remote.send_binary(bytes([DATA]) + data)
    remote.shutdown()


def _receive(remote: Any, local: socket.socket) -> None:
    announced: set[int] = set()
    while True:
        try:
            message = remote.recv()
        except Exception as error:
            log.debug("the tunnel has ended: %s", error)
            return
        if not message:
            return
        channel, content = message[0], message[1:]
        if channel not in announced:  # the first message of each channel is the port's number
            announced.add(channel)
        elif channel == DATA:
            try:
                local.sendall(content)
            except OSError:
                return
        elif channel == ERROR:
            log.debug("the pod's node says: %s", content.decode(errors="replace"))
            return
