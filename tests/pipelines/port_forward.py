"""A forwarded port, as of `kubectl port-forward`: it ends with all its connections, and somebody starts it again."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class PortForward:
    """Port of this machine that leads to another one."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self._open = target, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._serve()

    def stop(self) -> None:
        """End, and break every connection; nobody listens on the port any more."""
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def start(self) -> None:
        """Listen again on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._serve()

    def _serve(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                near, far = listener.accept()[0], socket.create_connection(self._target)
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while block := source.recv(1 << 16):
            sink.sendall(block)
        sink.shutdown(socket.SHUT_WR)
