"""Record the messages of a short federation of the version before, as gRPC carries them.

python tests/integration/record_messages.py OLD_SRC

runs an aggregator and two members with their own data from the folder ``src`` of an older checkout (``git archive
9370e5c5 src | tar x -C FOLDER``), and writes every frame of their streams, in order, to tests/fixtures/protocol_9.json.
test_recorded_messages.py replays them against this version.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from ports import free_address
from run_processes import ended, final, started, until
from vowel_data import vowel_examples

from fedloom.data.datasets import find_dataset
from fedloom.data.own import Own
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.transport.frames import parse_frame, seal_frame, serialize
from fedloom.transport.stream import METHOD, SERVICE
from fedloom.transport.wire import federation_pb2 as wire

RECORDED = Path(__file__).parents[1] / "fixtures" / "protocol_9.json"
CLASS_NAMES = find_dataset("vowel").spec.class_names
OWN = Own(kind="features", input_shape=(9,), classes=CLASS_NAMES)

EXPERIMENT = f"""\
name: recorded
seed: 3
data: {{own: {{kind: features, input_shape: [9], classes: [{", ".join(CLASS_NAMES)}]}}}}
model: {{name: mlp, hidden: [3]}}
algorithm: {{name: fedavg, local: {{steps: 2, lr: 0.1}}}}
federation:
  {{rounds: 2, clients_per_round: 2, min_clients: 2, deadline_s: 200, heartbeat_timeout_s: 600, checkpoint_every_s: 0}}
evaluation: {{every: 2}}
runtime: {{workers: 0}}
"""


def packed(root: Path, count: int) -> Path:
    """Pack the first speakers into ``s0``, ``s1``, ... and return their folder."""
    x, y, owners = vowel_examples()
    for speaker in range(count):
        np.savez(root / "source.npz", x=x[owners == speaker], y=y[owners == speaker])
        pack(root / "source.npz", root / f"s{speaker}", PackSettings(f"speaker-{speaker}", Request(OWN.spec)))
    return root


class Recorder:
    """Proxy of whole frames that records those of every stream, by worker."""

    def __init__(self, target: str) -> None:
        self.streams: list[dict[str, Any]] = []
        self._target, self._lock = target, threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(8))
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _join(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        stream: dict[str, Any] = {"worker": "", "frames": []}

        def record(direction: str, frame: bytes) -> bytes:
            with self._lock:
                stream["frames"].append([direction, base64.b64encode(frame).decode()])
            return frame

        def upwards() -> Iterator[bytes]:
            for frame in frames:
                if not stream["worker"]:
                    stream["worker"] = parse_frame(wire.WorkerFrame, frame).parts[0].hello.worker
                    self.streams.append(stream)
                yield record("up", frame)

        with grpc.insecure_channel(self._target) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(upwards())
            try:
                for frame in call:
                    yield record("down", frame)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())


def refusal(address: str) -> list[str]:
    """Return the frames with which the aggregator answers a Hello with another protocol."""
    hello = wire.Hello(protocol=10, oldest_protocol=9, package="0.2.0", worker="newer", incarnation="i")
    got: list[str] = []
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        sent = iter([seal_frame(serialize(wire.WorkerPart(hello=hello)))])
        for frame in channel.stream_stream(f"/{SERVICE}/{METHOD}")(sent):
            got.append(base64.b64encode(frame).decode())
    return got


def main() -> None:
    """Record one federation."""
    environment = {"PYTHONPATH": sys.argv[1], "PYTHONHASHSEED": "0"}  # a real start, not a fork of this version
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        root = packed(Path(folder), 2)
        (root / "e.yaml").write_text(EXPERIMENT)
        address = free_address()
        at = ("aggregator", root / "e.yaml", "--listen", address, "--out", root / "run", "--no-report")
        aggregator = processes.enter_context(started(*at, environment=environment))
        refused: list[str] = []
        until(lambda: refused or refused.extend(refusal(address)), "an answer")
        recorder = Recorder(address)
        for i in range(2):
            at = ("worker", "--aggregator", recorder.address, "--name", f"w{i}", "--data", root / f"s{i}")
            processes.enter_context(started(*at, environment=environment))
        ended(aggregator, 0)
        state = base64.b64encode(final(root / "run")).decode()
    recorded = {"experiment": EXPERIMENT, "refused": refused, "streams": recorder.streams, "state": state}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
