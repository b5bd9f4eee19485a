"""Long transfers through a proxy that cuts connections: the rest is sent, and nothing else is assembled."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trusted_wire import Federation
from transport_support import Sum, Worker, expected, make_aggregator, start_call

D = 12_500_000  # 50 MB
EVERY = 10_000_000
RATE = 25_000_000  # slower than both ends read, so that a cut loses what is on the line, and no more


class CuttingProxy:
    """Proxy that ends a connection after ``every`` bytes in one direction, and counts the bytes that it carries."""

    def __init__(self, target: str, every: int, rate: float = RATE) -> None:
        self.every, self.rate, self.cuts = every, rate, 0
        self.carried = {"up": 0, "down": 0}
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            for way, source, sink in (("up", near, far), ("down", far, near)):
                threading.Thread(target=self._carry, args=(way, source, sink), daemon=True).start()

    def _carry(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        left = self.every
        try:
            while left and (data := source.recv(min(left, 1 << 16))):
                left -= len(data)
                sink.sendall(data)
                self.carried[way] += len(data)
                time.sleep(len(data) / self.rate)
            self.cuts += not left
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def aggregator() -> Iterator[Any]:
    aggregator: Any = make_aggregator()
    aggregator.address = aggregator.start("127.0.0.1:0")
    yield aggregator
    aggregator.stop()


def ends_with_few_bytes(aggregator: Any, proxy: CuttingProxy, worker: Worker) -> None:
    """Run one exchange through the proxy; check its bits, and the bytes that the proxy has carried."""
    aggregator.wait_for({"a-1"}, 60)
    call = start_call(["a-1"], deadline_s=300, d=D)
    (answer,) = aggregator.exchange(call)
    assert isinstance(answer, Sum), answer
    assert torch.equal(answer.x, expected([call], 0))
    assert proxy.cuts >= 8
    assert worker.session.computed == 1
    size = call.message.x.nbytes
    assert all(size < carried <= 1.1 * size for carried in proxy.carried.values()), proxy.carried
    assert aggregator.refusals.counts == {}


def test_transfers_continue_where_a_cut_interrupted_them(aggregator) -> None:
    proxy = CuttingProxy(aggregator.address, EVERY)
    worker = Worker(proxy.address, "w", ["a-1"], reconnect_s=60)
    ends_with_few_bytes(aggregator, proxy, worker)
    worker.leave()
    proxy.close()


def test_transfers_continue_over_tls(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    aggregator = federation.start()
    proxy = CuttingProxy(federation.address, EVERY)
    federation.address = proxy.address
    worker = federation.worker(federation.member("north"), clients=["a-1"], reconnect_s=60)
    ends_with_few_bytes(aggregator, proxy, worker)
    federation.stop()
    proxy.close()
