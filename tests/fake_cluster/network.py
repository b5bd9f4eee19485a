"""Addresses of Services and pods on the loopback network, and forwarders of a Service's connections to its pods."""

from __future__ import annotations

import errno
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

API_PORT = 6443
Backend = tuple[str, int]


class Network:
    """Addresses 127.A.B.x of this cluster: A.B is free if nothing listens on its first address.

    Linux answers on all of 127.0.0.0/8 without configuration; other systems do not.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._lock = threading.Lock()
        for _ in range(100):
            self.prefix = f"127.{random.randint(16, 250)}.{random.randint(0, 250)}"
            self.api = socket.socket()
            self.api.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                self.api.bind((f"{self.prefix}.1", API_PORT))
            except OSError as error:
                self.api.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                self.api.listen(64)
                return
        raise RuntimeError("no free loopback network was found")

    def address(self) -> str:
        """Return an unused address."""
        with self._lock:
            free = [a for i in range(2, 255) if (a := f"{self.prefix}.{i}") not in self._taken]
            address = random.choice(free)
            self._taken.add(address)
            return address

    def release(self, address: str) -> None:
        """Allow an address to be reused."""
        with self._lock:
            self._taken.discard(address)


class Forwarder:
    """One port of a Service: each connection is forwarded to a ready pod, or closed if there is none.

    Parameters
    ----------
    backends
        Function that returns the ready pods, called for each connection.
    """

    def __init__(self, address: str, port: int, backends: Callable[[], list[Backend]]) -> None:
        self._backends = backends
        self._listener = socket.create_server((address, port), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening; open connections stay, as with kube-proxy."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        backends = self._backends()
        random.shuffle(backends)
        with client:
            for backend in backends:
                with suppress(OSError), socket.create_connection(backend, timeout=5) as pod:
                    pod.settimeout(None)
                    back = threading.Thread(target=_pump, args=(pod, client), daemon=True)
                    back.start()
                    _pump(client, pod)
                    back.join()
                    return


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Copy data until the end, and then shut down the other direction."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):  # both: half-open connections are useless once the other side is lost
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
