"""Bytes of a large model over a line that breaks, and memory of the processes that send and train it.

    .venv/bin/python research/benchmarks/transfers.py bytes [--megabytes 1000] [--every 100] [--rate 2]
    .venv/bin/python research/benchmarks/transfers.py memory [--workers 1] [--secure]

``bytes`` sends a model to a worker and its update back through a proxy that ends the connection after every so many MB
in one direction, and prints what the proxy has carried, as a multiple of the model. ``memory`` runs two rounds of
FedAvg with a perceptron of 200 MB, and one client per worker; it prints the peak memory of the aggregator and of its
largest worker, above that of the same run with a small model, as a multiple of the large one: anonymous memory
(RssAnon, sampled every 10 ms), and all resident memory (VmHWM), which includes pages of files that the system can drop.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import descendants, describe, machine, resident_bytes, table

from fedloom.federation.transport import Call, ConversationKey
from fedloom.messages import Message, Quantity, broadcast, rows
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.exchanges import ServedRun
from fedloom.transport.stream import Introduction
from fedloom.transport.worker import serve

MB = 1_000_000


class Model(Message):
    """Shared model."""

    theta: torch.Tensor = broadcast(Quantity.MODEL)


class Update(Message):
    """Change of the model by a client."""

    delta_theta: torch.Tensor = rows(Quantity.MODEL_UPDATE)


class Session:
    """Clients' side, which answers with the negative of what it has received."""

    vocabulary: ClassVar = {"Model": Model}

    def answer(self, key: Any, exchange: int, rows: Sequence[int], *rest: Any) -> Iterator[tuple[int, Message]]:
        """Yield the answers."""
        del key, exchange
        for row in rows:
            yield row, Update(-rest[1].theta[None])

    def close(self, key: ConversationKey) -> None:
        """End a conversation."""


class CuttingProxy:
    """Proxy that ends a connection after ``every`` bytes in one direction, and counts the bytes that it carries."""

    def __init__(self, target: str, every: int, rate: float) -> None:
        self.every, self.rate, self.cuts = every, rate, 0
        self.carried = {"down": 0, "up": 0}
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target)
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


def measure_bytes(options: argparse.Namespace) -> None:
    """Print the bytes of one exchange."""
    d = options.megabytes * MB // 4
    run = ServedRun(
        name="run", incarnation="a", experiment="{}", algorithm="none", version=1, vocabulary={"Update": Update},
        dtype=torch.float32, clients=("client",),
    )  # fmt: skip
    aggregator = Aggregator(run)
    proxy = CuttingProxy(aggregator.start("127.0.0.1:0"), options.every * MB, options.rate * MB)
    introduction = Introduction("worker", ["client"], {"none": 1})
    stop = threading.Event()
    worker = threading.Thread(
        target=serve,
        args=(proxy.address, introduction),
        kwargs={"make_session": lambda joined: Session(), "stop": stop},
    )
    worker.start()
    aggregator.wait_for({"client"}, 60)
    theta = torch.randn(d)
    key, started = ConversationKey(1, 0, 0, "train"), time.monotonic()
    call = Call(key, 0, (0,), ("client",), Model(theta), {Update: {"delta_theta": (d,)}})
    (answer,) = aggregator.exchange(call)
    same = isinstance(answer, Update) and torch.equal(answer.delta_theta[0], -theta)
    seconds, size = time.monotonic() - started, 4 * d
    print(f"{proxy.cuts} cuts in {seconds:.0f} s; {'the same bits' if same else 'WRONG BITS'}")
    print(table(["direction", "bytes / model"], [[way, f"{n / size:.3f}"] for way, n in proxy.carried.items()]))
    stop.set()
    worker.join()
    aggregator.stop()


EXPERIMENT = """
name: memory
data:
  dataset: fashion-mnist
  partition: {{scheme: classes, clients: {workers}, classes_per_client: 2, train_per_client: 20, test_per_client: 10}}
  held_out_fraction: 0.0
model: {{name: mlp, hidden: [{width}, {width}]}}
algorithm: {{name: fedavg, personalize_steps: 0, local: {{steps: 2, batch_size: 16}}}}
federation: {{rounds: 2, clients_per_round: {workers}, deadline_s: 3600{secure}}}
evaluation: {{every: 1000000}}
runtime: {{workers: {workers}}}
"""


def peaks(workers: int, width: int, secure: bool) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Return the peaks (anonymous, resident) of the aggregator and of the largest worker, and the size of the model."""
    with tempfile.TemporaryDirectory() as folder:
        sums = ", secure_aggregation: {}" if secure else ""
        path = Path(folder) / "memory.yaml"
        path.write_text(EXPERIMENT.format(workers=workers, width=width, secure=sums))
        command = [sys.executable, "-m", "fedloom", "run", str(path), "--no-report", "--out", str(Path(folder) / "run")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        highest: dict[int, tuple[int, int]] = {}
        while process.poll() is None:
            for number in descendants(process.pid):
                highest.setdefault(number, (0, 0))
            for _ in range(100):
                for number, (anonymous, resident) in highest.items():
                    highest[number] = (
                        max(anonymous, resident_bytes(number, "RssAnon")),
                        max(resident, resident_bytes(number, "VmHWM")),
                    )
                time.sleep(0.01)
        if process.returncode:
            raise SystemExit(process.stderr.read() if process.stderr else "the run failed")
        aggregator = highest.pop(process.pid)
        return aggregator, max(highest.values()), 4 * (784 * width + width * width + 12 * width)


def measure_memory(options: argparse.Namespace) -> None:
    """Print the memory of a run."""
    *small, _ = peaks(options.workers, 8, options.secure)
    *large, size = peaks(options.workers, 6_700, options.secure)
    rows = [
        [f"{side}, {kind}", f"{(high - low) / size:.2f}", f"{low / MB:.0f} MB"]
        for side, highs, lows in zip(("aggregator", "worker"), large, small, strict=True)
        for kind, high, low in zip(("anonymous", "resident"), highs, lows, strict=True)
    ]
    print(f"model of {size / MB:.0f} MB, {options.workers} workers{', secure sums' if options.secure else ''}")
    print(table(["process", "peak above baseline / model", "baseline"], rows))


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["bytes", "memory"])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="MB between two cuts")
    parser.add_argument("--rate", type=float, default=2.0, help="MB/s")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--secure", action="store_true")
    options = parser.parse_args()
    print(describe(machine()))
    (measure_bytes if options.figure == "bytes" else measure_memory)(options)


if __name__ == "__main__":
    main()
