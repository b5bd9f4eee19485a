"""Tunnel to an aggregator, and the client that follows its progress, which shows that its launcher is alive."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from fedloom.cluster.api import Api
from fedloom.core.words import pluralize
from fedloom.errors import AbandonedError, ExperimentError, RefusedError
from fedloom.federation.activity import Activity, LastEvaluation
from fedloom.security.options import ClientOptions, Credentials
from fedloom.tasks.names import GROUPS, in_words
from fedloom.transport.control import follow

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
    rounds_announced: set[int] = set()
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
                if channel not in rounds_announced:  # the first message of each channel is the port number
                    rounds_announced.add(channel)
                elif channel == DATA:
                    local.sendall(content)
                elif channel == ERROR:
                    log.debug("the pod's node reports: %s", content.decode(errors="replace"))
                    return


LINE_EVERY_S = 10.0
CONNECT_S = 10.0
RETRY_INTERVAL_S = 1.0
LOST_AFTER_S = 60.0


def launchers_credentials() -> Credentials:
    """Return a launcher's credentials, from the environment as for a worker; plaintext is allowed, as on pod networks.

    Raise RefusedError or ExperimentError if the environment's token or certificate is invalid.
    """
    return Credentials(ClientOptions.from_folder(insecure=True))


class ProgressClient:
    """Reporter of a run's progress, through restarts of its aggregator.

    Parameters
    ----------
    address
        ``host:port`` of the aggregator.
    say
        Called with lines of progress for the user.
    orphan_after_s
        Seconds without a watcher after which the aggregator ends; None is never.

    Attributes
    ----------
    latest
        Latest state of the federation; None before the first.
    """

    def __init__(
        self,
        address: str,
        say: Callable[[str], None],
        *,
        orphan_after_s: float | None = None,
    ) -> None:
        self.latest: Activity | None = None
        self._orphan_after_s = orphan_after_s
        self._lost_after_s = min(LOST_AFTER_S, (orphan_after_s or 2 * LOST_AFTER_S) / 2)
        self._address = address
        self._say = say
        self._stopping = threading.Event()
        self._said_at = -LINE_EVERY_S
        self._answered_at = time.monotonic()
        self._reported_lost = False
        self._shown: tuple[str, int] | None = None
        self._moved: tuple[int, str] | None = None

    @property
    def under_way(self) -> bool:
        """True once the rounds have started; the aggregator then decides which workers it can do without."""
        return self.latest is not None and (self.latest.round > 0 or self.latest.phase not in ("waiting", "failed"))

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the progress in a separate thread during the block."""
        # Not joined: it may be connecting, and has no state to keep.
        threading.Thread(target=self._follow, name="follow", daemon=True).start()
        try:
            yield
        finally:
            self._stopping.set()

    def _follow(self) -> None:
        last_refusal = ""  # last reported reason
        while not self._stopping.is_set():
            try:
                for now in follow(self._address, connect_s=CONNECT_S, credentials=launchers_credentials()):
                    if self._stopping.is_set():
                        return
                    self._answered_at, self._reported_lost, last_refusal = time.monotonic(), False, ""
                    self.latest = self._report(now)
                if self.latest is not None and self.latest.phase == "finished":
                    return
            except ExperimentError as error:  # the environment is invalid, and retrying does not help
                self._say(f"progress is not shown: {error}{self._warning()}")
                return
            except RefusedError as error:  # may succeed once a file of tokens or identities has been refreshed
                if str(error) != last_refusal:
                    last_refusal = str(error)
                    self._say(f"progress is not shown for now: {error}{self._warning()}")
            except AbandonedError as error:  # not started yet, or about to be replaced
                if not self._reported_lost and time.monotonic() - self._answered_at > self._lost_after_s:
                    self._reported_lost = True
                    self._say(f"no progress is shown: {error.message}{self._warning()}")
            self._stopping.wait(RETRY_INTERVAL_S)

    def _warning(self) -> str:
        if self._orphan_after_s is None:
            return ""
        return f"\nthe aggregator ends without a watcher after {self._orphan_after_s:g} s (cluster.orphan_after_s)"

    def _report(self, now: Activity) -> Activity:
        """Report changes; return the new state."""
        previous = self.latest
        if now.measured is not None and (previous is None or now.measured != previous.measured):
            self._say(f"after round {now.measured.round}: {_measured(now.measured)}")
        if now.phase == "saving" and previous is not None:  # every round is saved
            now = replace(now, phase=previous.phase)
        phase_key, round_key = (now.phase, len(now.workers)), (now.round, now.message)
        due = now.phase in ("waiting", "failed") or time.monotonic() - self._said_at >= LINE_EVERY_S
        if phase_key != self._shown or (round_key != self._moved and due):
            self._said_at = time.monotonic()
            self._say(_line(now))
        self._shown, self._moved = phase_key, round_key
        return now


def _line(now: Activity) -> str:
    absent = now.clients.absent if now.phase == "waiting" else None
    suffix = f", {pluralize(absent, 'client')} without a worker" if absent else ""
    message = f": {now.message}" if now.message else ""
    return f"{now.phase}: {rounds_of(now)}, workers: {len(now.workers)}{suffix}{message}"


def rounds_of(now: Activity) -> str:
    """Return the numbers of completed and planned rounds."""
    return f"round {now.round}" if now.rounds is None else f"round {now.round}/{now.rounds}"


def _measured(evaluation: LastEvaluation) -> str:
    """Return the headline metric of an evaluation."""
    groups = {name: group.values for name in GROUPS if (group := evaluation.groups.get(name)) is not None}
    headline, parts = in_words(evaluation.headline, groups)
    return f"{headline} {', '.join(parts)}"
