"""Model service: throughput, latency, cost, and correctness of each model.

    .venv/bin/python research/benchmarks/serving.py [--seconds S] [--json FILE]

PeFLL's LeNet (85,822 parameters). `fedloom serve` is one process, and the load comes from another: clients that have
read the opening, send a descriptor and read their model, so that the server is measured. For comparison, in the same
session, the bounds: the hypernetwork's product in full tiles, and a bare gRPC stream of as many bytes and turns. Then:
latency at half of the load; servers behind one port, each on a core of its own, under the load of h2load (Debian's
nghttp2-client), which needs a tenth of a core; a whole client; a server that is killed and restarted while clients make
requests, each of whose models is compared with the hypernetwork's bit for bit; and an aggregator that hands out models
while it trains (Fashion-MNIST, one worker), if the data are available.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import torch
import yaml
from common import cpu_s, describe, machine, made_up_manifest, percentile, table, write_json

import fedloom
from fedloom import experiment as experiments
from fedloom.algorithms.pefll import Descriptor, DescriptorRequest, PeFLLServer, PersonalizedModel
from fedloom.data.folders import data_root
from fedloom.engine import assemble, run_data
from fedloom.runs.checkpoint import Checkpoint, Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.transport.codec import Cutter, encode
from fedloom.transport.frames import WireError, seal_frame, serialize
from fedloom.transport.newcomer import Models
from fedloom.transport.stream import MODELS, PERSONALIZE, PartReader, message_frames
from fedloom.transport.wire import personalization_pb2 as wire

CLIENTS, CLASSES, DESCRIPTORS = 100, 10, 64
D = 85_822
BARE = "/bare.Models/Get"
PROGRAM = (sys.executable, "-m", "fedloom")
REST_S = 0.02
WORDS = {kind.__name__: kind for kind in (DescriptorRequest, PersonalizedModel)}

EXPERIMENT: dict[str, Any] = {
    "name": "serving",
    "data": {
        "dataset": "fashion-mnist",
        "partition": {
            "scheme": "classes", "clients": CLIENTS, "classes_per_client": 5, "train_per_client": 60,
            "test_per_client": 20,
        },
    },
    "model": {"name": "lenet"},
    "algorithm": {"name": "pefll", "local": {"steps": 20}},
    "federation": {"rounds": 100_000, "clients_per_round": 10, "checkpoint_every_s": 5, "deadline_s": 600},
    "evaluation": {"every": 100_000},
    "runtime": {"workers": 1},
}  # fmt: skip


def make_run(folder: Path) -> tuple[PeFLLServer, int]:
    """Create a run's folder with an untrained checkpoint; return its server algorithm and the descriptors' length."""
    manifest = made_up_manifest("fashion-mnist", (f"c{i}" for i in range(CLIENTS)), CLASSES, 6)
    e = experiments.parse_experiment(yaml.safe_dump(EXPERIMENT))
    parts = assemble.make_parts(e, manifest)
    run = RunFolder(folder)
    run.make(e.resolved_yaml())
    run.write("partition.json", manifest.to_json())
    server = parts.server_algorithm()
    assert isinstance(server, PeFLLServer)
    checkpoints = Checkpoints(run.checkpoints)
    checkpoints.save(Checkpoint("pefll", parts.algorithm.version, 1, None, server.state))
    checkpoints.close()
    return server, server.sizes["l"]


def descriptors(size: int) -> torch.Tensor:
    """Return the clients' descriptors: ``[DESCRIPTORS, l]``."""
    return torch.randn(DESCRIPTORS, size, generator=torch.Generator().manual_seed(1))


# --- load, in a separate process --------------------------------------------------------------------------------------


@dataclass
class Load:
    """Result of a load."""

    models: int = 0
    refused: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the load itself, which shares the machine with the servers."""
    latencies: list[float] = field(default_factory=list)


async def loaded(addresses: Sequence[str], seconds: float, rate: float | None, size: int, *, bare: bool) -> Load:
    """Request models for a period: for 64 clients at a time, or at a fixed rate regardless of the outcomes."""
    asks = [] if bare else await _asks(addresses[0], descriptors(size))
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    channels = [grpc.aio.insecure_channel(a, options=options) for a in addresses for _ in range(2)]
    method = BARE if bare else f"/{MODELS}/{PERSONALIZE}"
    calls = [channel.stream_stream(method) for channel in channels]
    load, number = Load(), 0

    async def one(i: int) -> None:
        started = time.perf_counter()
        call = calls[i % len(calls)]()
        try:
            for frame in (b"ask", b"answer") if bare else asks[i % len(asks)]:
                await call.write(frame)
                data = await call.read()
            await call.done_writing()
            if data is grpc.aio.EOF:
                raise ConnectionError
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, ConnectionError):
            load.refused += 1
            return
        load.models += 1
        load.bytes_down += len(data)
        load.latencies.append(time.perf_counter() - started)
        await call.code()

    async def worker(ends: float) -> None:
        nonlocal number
        while time.perf_counter() < ends:
            number += 1
            await one(number)

    await asyncio.gather(*(one(i) for i in range(8)))  # opens the connections
    load.__init__()  # type: ignore[misc]
    started, used_s = time.perf_counter(), time.process_time()
    if rate is None:
        await asyncio.gather(*(worker(started + seconds) for _ in range(64)))
    else:
        tasks = []
        for i in range(int(rate * seconds)):
            wait_s = started + i / rate - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(one(i)))
        await asyncio.gather(*tasks)
    load.seconds = time.perf_counter() - started
    load.cpu_s = time.process_time() - used_s
    for channel in channels:
        await channel.close()
    return load


async def _asks(address: str, v: torch.Tensor) -> list[tuple[bytes, bytes]]:
    """Return the frames of clients: their request and their descriptor."""
    models = Models(address)
    found = await models.describe(60)
    await models.close()
    made = []
    for i, row in enumerate(v):
        ask = wire.Ask(
            client=f"c{i}",
            package=fedloom.__version__,
            algorithm="pefll",
            algorithm_version=found.about.version,
        )
        (answer,) = message_frames(Cutter(wire.NewcomerPart), encode(Descriptor(row[None])))
        made.append((seal_frame(serialize(wire.NewcomerPart(ask=ask))), answer))
    return made


async def serve_bare(opening: int) -> None:
    """Run a stream that answers the first message with as many bytes as the opening has, the second with a model's."""
    sent = [bytes(opening), bytes(4 * D)]

    async def get(_: Any, context: Any) -> None:
        for message in sent:
            await context.read()
            await context.write(message)

    server = grpc.aio.server()
    name, method = BARE.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(get)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {method: handler})])
    print(f"at 127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


# --- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def process(*command: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server process and its address, which it prints at the end of a line."""
    started = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        line = next(line for line in started.stdout if " at " in line or line.startswith("at "))
        yield started, line.split()[-1]
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def put_under(
    load: Sequence[str], servers: Sequence[int], seconds: float, size: int, **options: Any
) -> dict[str, float]:
    """Put servers under load from another process; return models per second, latencies, and server CPU per model."""
    command = [sys.executable, __file__, "--load", *load, "--seconds", str(seconds), "--size", str(size)]
    for key, value in options.items():
        command += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    before = cpu_s(servers)
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    used = cpu_s(servers) - before
    return {**found, "cpu_ms": 1e3 * used / max(1, found["models"] + 8)}


def summed_up(load: Load) -> dict[str, float]:
    """Return the figures of a load."""
    return {
        "models": load.models,
        "refused": load.refused,
        "per_s": load.models / load.seconds,
        "load_ms": 1e3 * load.cpu_s / max(1, load.models),
        "bytes": load.bytes_down / max(1, load.models),
        "p50_ms": 1e3 * percentile(load.latencies, 0.5) if load.latencies else 0.0,
        "p99_ms": 1e3 * percentile(load.latencies, 0.99) if load.latencies else 0.0,
    }


def behind_one_port(run: Path, size: int, seconds: float, cores: Sequence[int]) -> dict[str, float]:
    """Return the models per second of servers that share a port, one on each of these cores; h2load runs there, too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    serve = [*PROGRAM, "serve", run, "--listen", address, "--set", "share_port=true"]
    with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile() as body:
        servers = [stack.enter_context(process("taskset", "-c", core, *serve))[0].pid for core in cores]
        for frame in asyncio.run(_asks(address, descriptors(size)))[0]:
            body.write(b"\0" + len(frame).to_bytes(4, "big") + frame)  # as gRPC frames a message
        body.flush()
        where, lasting = ",".join(map(str, cores)), f"{1e3 * seconds:.0f}ms"
        load = f"taskset -c {where} h2load -c 32 -m 4 -D {lasting} --warm-up-time 2 -d {body.name}".split()
        load += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        before, own = cpu_s(servers), os.times()
        url = f"http://{address}/{MODELS}/{PERSONALIZE}"
        said = subprocess.run([*load, url], check=True, stdout=subprocess.PIPE, text=True).stdout
        used, took = cpu_s(servers) - before, os.times()
    models, received = (
        int(re.findall(pattern, said)[0]) for pattern in (r"requests: (\d+) total", r"traffic: \S+ \((\d+)\) total")
    )
    if received < 4 * D * models:
        raise RuntimeError(f"{models} answers had {received} bytes: some were refusals")
    load_s = took.children_user + took.children_system - own.children_user - own.children_system
    with_warm_up_s = seconds + 2
    return {"per_s": models / seconds, "cores": used / with_warm_up_s, "load_cores": load_s / with_warm_up_s}


def product_ms(server: PeFLLServer, size: int, seconds: float) -> float:
    """Return the hypernetwork's ms per model in full tiles."""
    v, count, ends = descriptors(size), 0, time.perf_counter() + seconds
    started = time.process_time()
    while time.perf_counter() < ends:
        server.hypernetwork(server.eta_h, v)
        count += len(v)
    return 1e3 * (time.process_time() - started) / count


def conversation_bytes(address: str) -> dict[str, float]:
    """Return the bytes and the seconds of a client's conversation."""
    from fedloom.federation.loop import vocabulary
    from fedloom.serving.personal import RequestingClient
    from fedloom.serving.personalization import PersonalizationRequest

    async def ask() -> dict[str, float]:
        models = Models(address)
        found: dict[str, float] = {}
        try:
            about = (await models.describe(60)).about
            x = torch.randint(256, (32, 1, 28, 28), dtype=torch.uint8)
            request = PersonalizationRequest(address, x, torch.arange(32) % CLASSES)
            client = RequestingClient.described(request, about)
            for which in ("first", "whole"):
                started = time.perf_counter()
                words = vocabulary(client.parts.algorithm)
                answered = await models.converse(about, client.id, words, client.speak)
                found |= {f"{which}_down": answered.down, f"{which}_up": answered.up}
                found[f"{which}_ms"] = 1e3 * (time.perf_counter() - started)
        finally:
            await models.close()
        return found

    return asyncio.run(ask())


def killed_and_started_again(run: Path, server: PeFLLServer, size: int, seconds: float) -> dict[str, float]:
    """Have clients make requests while their server is killed and restarted; compare each model bit for bit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    v = descriptors(size)
    expected = server.hypernetwork(server.eta_h, v)
    address = f"127.0.0.1:{port}"
    command = [*PROGRAM, "serve", str(run), "--listen", address]
    serving = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    async def ask() -> tuple[int, int, int]:
        asks = await _asks(address, v)
        right = wrong = refused = 0
        ends, killed = time.perf_counter() + seconds, False
        nonlocal serving
        while time.perf_counter() < ends:
            async with grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
                for i in range(8):
                    call = channel.stream_stream(f"/{MODELS}/{PERSONALIZE}")(timeout=10)
                    try:
                        reader = PartReader(call.read, wire.ModelFrame)
                        for frame in asks[i]:
                            await call.write(frame)
                            await reader.part("header")
                            received = await reader.message(WORDS, 1 << 30)
                    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, WireError):
                        refused += 1
                        await asyncio.sleep(REST_S)
                        continue
                    theta = received.message().tensors()["theta"][0]
                    right, wrong = (right + 1, wrong) if torch.equal(theta, expected[i]) else (right, wrong + 1)
            if not killed and time.perf_counter() > ends - 0.8 * seconds:
                killed = True
                serving.kill()
                serving.wait()
                serving = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        return right, wrong, refused

    try:
        right, wrong, refused = asyncio.run(ask())
    finally:
        serving.terminate()
        serving.wait(20)
    return {"right": right, "wrong": wrong, "refused": refused}


def beside_training(folder: Path, seconds: float, rate: float, size: int) -> dict[str, float] | None:
    """Return an aggregator's rounds per second with and without this many models per second; None without the data."""
    if not (data_root() / "datasets" / "fashion-mnist").is_dir():
        return None
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT))
    subprocess.run([*PROGRAM, "partition", str(path)], check=True, stdout=subprocess.DEVNULL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    out = folder / "out"
    none = subprocess.DEVNULL
    partition = run_data.make_partition(experiments.load_experiment(path)).folder
    options = ["--listen", address, "--out", str(out), "--no-report"]
    aggregator = subprocess.Popen([*PROGRAM, "aggregator", str(path), *options], stdout=none, stderr=none)
    whose = ["--aggregator", address, "--partition", str(partition)]
    worker = subprocess.Popen([*PROGRAM, "worker", *whose], stdout=none, stderr=none)
    try:
        ends = time.monotonic() + 300
        while not (out / "journal.jsonl").exists() or not _attempts(out):  # round 0 already has a checkpoint
            if time.monotonic() > ends or aggregator.poll() is not None:
                raise RuntimeError("the aggregator has made no round")
            time.sleep(0.5)
        alone = _rounds(out, seconds)
        found = put_under([address], [aggregator.pid], 1.0, size, rate=rate)  # the first request loads the round
        rounds, started, before = len(_attempts(out)), time.perf_counter(), cpu_s([aggregator.pid])
        found = put_under([address], [aggregator.pid], seconds, size, rate=rate)
        took = time.perf_counter() - started
        beside = (len(_attempts(out)) - rounds) / took
        share = (cpu_s([aggregator.pid]) - before) / took
    finally:
        for each in (worker, aggregator):
            each.terminate()
        for each in (worker, aggregator):
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(30)
    return {
        "rounds_per_s_alone": alone,
        "rounds_per_s_beside": beside,
        "aggregator_cores_beside": share,
        "models_per_s": found["per_s"],
        "refused": found["refused"],
        "p50_ms": found["p50_ms"],
        "p99_ms": found["p99_ms"],
    }


def _attempts(out: Path) -> list[str]:
    return (out / "journal.jsonl").read_text().splitlines()


def _rounds(out: Path, seconds: float) -> float:
    before, started = len(_attempts(out)), time.perf_counter()
    time.sleep(seconds)
    return (len(_attempts(out)) - before) / (time.perf_counter() - started)


# --- measurement ------------------------------------------------------------------------------------------------------


def measure(seconds: float) -> dict[str, Any]:
    """Return all figures except those during training."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        server, size = make_run(run)
        figures["product_ms"] = product_ms(server, size, min(seconds, 3.0))
        with process(*PROGRAM, "serve", run, "--listen", "127.0.0.1:0") as (one, first):
            figures["clients"] = conversation_bytes(first)
            opening = figures["clients"]["whole_down"] - 4 * D
            with process(sys.executable, __file__, "--bare-server", int(opening)) as (bare, address):
                figures["bare"] = put_under([address], [bare.pid], seconds, size, bare=True)
            figures["serve"] = put_under([first], [one.pid], seconds, size)
            half = max(1.0, figures["serve"]["per_s"] / 2)
            figures["half"] = put_under([first], [one.pid], seconds, size, rate=half)
        if shutil.which("h2load"):
            cores = sorted(os.sched_getaffinity(0))[:2]
            figures["one_port"] = [
                behind_one_port(run, size, seconds, cores[:count]) for count in range(1, len(cores) + 1)
            ]
        figures["killed"] = killed_and_started_again(run, server, size, max(4.0, 2 * seconds))
    return figures


def rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures as lines of a table."""
    s, bare, half = (figures[key] for key in ("serve", "bare", "half"))
    clients, killed = figures["clients"], figures["killed"]
    bounds = figures["product_ms"] + bare["cpu_ms"]

    def most(found: dict[str, float]) -> float:  # models a second, if servers and load use two cores to the full
        return 2e3 / (found["cpu_ms"] + found["load_ms"])

    return [
        ("bound: hypernetwork in full tiles, ms of CPU a model", f"{figures['product_ms']:.2f}"),
        ("bound: bare gRPC stream, ms of the server's CPU a model", f"{bare['cpu_ms']:.2f}"),
        ("bare gRPC stream, models/s", f"{bare['per_s']:.0f}"),
        ("`fedloom serve`: ms of the server's CPU a model", f"{s['cpu_ms']:.2f}"),
        ("over the sum of its bounds", f"{s['cpu_ms'] / bounds:.2f}"),
        ("the load's own CPU, ms a model: bare; `fedloom serve`", f"{bare['load_ms']:.2f}; {s['load_ms']:.2f}"),
        ("models/s, 64 clients at a time", f"{s['per_s']:.0f}"),
        ("two cores shared with the load, at most: bare; `fedloom serve`", f"{most(bare):.0f}; {most(s):.0f}"),
        ("p50 / p99 then, ms", f"{s['p50_ms']:.0f} / {s['p99_ms']:.0f}"),
        (f"p50 / p99 at half of it ({half['per_s']:.0f} a second), ms", f"{half['p50_ms']:.0f} / {half['p99_ms']:.0f}"),
        *_shared(figures.get("one_port", [])),
        ("a whole client: KiB down / up; ms", _client(clients, "whole")),
        ("killed and started again: right / refused / wrong", "{right} / {refused} / {wrong}".format(**killed)),
    ]


def _shared(found: Sequence[dict[str, float]]) -> Iterator[tuple[str, str]]:
    if not found:
        yield ("servers behind one port", "not measured: h2load (nghttp2-client) is missing")
    for count, of in enumerate(found, 1):
        yield (
            f"{count} behind one port: models/s; over one",
            f"{of['per_s']:.0f}; {of['per_s'] / found[0]['per_s']:.2f}",
        )
        yield (f"{count} behind one port: cores in use; by h2load", f"{of['cores']:.2f}; {of['load_cores']:.2f}")


def train_beside(seconds: float, rate: float) -> dict[str, float] | None:
    """Return the figures of an aggregator that hands out models while it trains."""
    with tempfile.TemporaryDirectory() as scratch:
        _, size = make_run(Path(scratch) / "run")
        return beside_training(Path(scratch), max(10.0, seconds), max(1.0, rate), size)


def training_rows(training: dict[str, float]) -> list[tuple[str, str]]:
    """Return the training figures as lines of a table."""
    alone, beside = training["rounds_per_s_alone"], training["rounds_per_s_beside"]
    return [
        ("training alone / beside, rounds/s", f"{alone:.2f} / {beside:.2f}"),
        (f"rounds slower by, at {training['models_per_s']:.0f} models/s", f"{100 * (1 - beside / alone):.0f} %"),
        ("the aggregator's share of a core then", f"{100 * training['aggregator_cores_beside']:.0f} %"),
        ("p50 / p99 beside training, ms", "{p50_ms:.0f} / {p99_ms:.0f}".format(**training)),
    ]


def _client(clients: dict[str, float], which: str) -> str:
    down, up, ms = (clients[f"{which}_{what}"] for what in ("down", "up", "ms"))
    return f"{down / 1024:.1f} / {up / 1024:.2f}; {ms:.0f}"


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each load in seconds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--no-training", action="store_true", help="leave out the aggregator that trains")
    parser.add_argument("--load", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare-server", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare_server is not None:
        asyncio.run(serve_bare(options.bare_server))
        return
    if options.load:
        o = options
        work = loaded(o.load, o.seconds, o.rate, o.size, bare=o.bare)
        print(json.dumps(summed_up(asyncio.run(work))))
        return
    about = machine()
    print(describe(about), flush=True)
    figures = measure(options.seconds)
    print(table(("", f"{D:,} parameters"), rows(figures)), flush=True)
    if not options.no_training:
        figures["training"] = train_beside(options.seconds, figures["half"]["per_s"] / 2)
        if figures["training"] is not None:
            print(table(("", "training"), training_rows(figures["training"])))
    write_json(options.json, about, {"serving": figures})


if __name__ == "__main__":
    main()
