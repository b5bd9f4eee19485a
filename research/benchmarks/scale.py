"""Aggregator with very many workers and clients, and with very many rounds.

    .venv/bin/python research/benchmarks/scale.py [--part workers|rounds] [--cohort N] [--hidden N] [--json FILE]

``workers``: 1,000 workers, each with its own TLS connection, token and identity, announce 100 clients each. They are
scripted peers in four processes without torch (``peers.py``) and answer at once; the aggregator is
``fedloom aggregator``. Measured are joining, the evaluation of all clients, rounds and memory; and, after the
aggregator was killed, the time until all have returned and rounds continue. ``--hidden`` replaces the tiny model by a
perceptron with so many units: 5,263 of them have 99,999 parameters. ``rounds``: a tiny model and four workers
for 20,000 rounds: CPU time of a round, memory, file descriptors and journal over time, and the time to resume.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from common import MIB, cpu_s, describe, machine, resident_bytes, table, write_json
from peers import worker_name

import fedloom
from fedloom.algorithms.fedavg import FEDAVG, Update
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.messages import Message
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.tokens import keep_token, make_token
from fedloom.transport.codec import encode, specs_to_wire
from fedloom.transport.versions import PROTOCOL
from fedloom.transport.wire import federation_pb2 as wire

FEATURES, CLASSES = 16, 2
PROCESSES = 4
WAIT_S = 900.0


class Federation:
    """Aggregator in its own process, and its peers."""

    def __init__(
        self, folder: Path, workers: int, clients: int, cohort: int, held: ExitStack, hidden: int | None = None
    ) -> None:
        self.folder, self.run, self._held = folder, folder / "run", held
        self.workers, self.clients = workers, clients
        self.experiment = folder / "scale.yaml"
        self.experiment.write_text(yaml.safe_dump(_experiment(workers * clients, cohort, hidden)))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        tokens = [make_token() for _ in range(workers)]
        kept = [keep_token(worker_name(i), token).model_dump(mode="json") for i, token in enumerate(tokens)]
        self._credentials = folder / "server"
        self._credentials.mkdir()
        (self._credentials / "tokens.json").write_text(json.dumps({"version": 1, "tokens": kept}))
        identities = [
            {"name": worker_name(i), "token": worker_name(i), "roles": ["worker"], "clients": [f"{worker_name(i)}-*"]}
            for i in range(workers)
        ]
        (self._credentials / "identities.yaml").write_text(json.dumps({"version": 1, "identities": identities}))
        self._ca = make_ca(folder).certificate
        make_certificate("server", folder, folder, hosts=["127.0.0.1"])
        (self._credentials / "ca.crt").unlink()  # peers are admitted by token
        told = {
            "address": self.address,
            "ca": str(self._ca),
            "protocol": PROTOCOL,
            "package": fedloom.__version__,
            "algorithms": {FEDAVG.name: FEDAVG.version},
            "clients": clients,
            "tokens": [token.get_secret_value() for token in tokens],
            "answers": {
                "SharedModel": _template(
                    Update(
                        delta_theta=torch.full((1, parameters(hidden)), 1e-3),
                        steps=torch.ones(1, 1, dtype=torch.float64),
                        loss=torch.ones(1, 1, dtype=torch.float64),
                    )
                ),
                "PersonalizeRequest": _template(EvaluationPlan.of_classes(CLASSES).nothing(1, 2)),
            },
        }
        (folder / "peers.json").write_text(json.dumps(told))
        self.aggregator: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Start the aggregator, for the first time or again."""
        trust = ("--credentials", str(self._credentials))
        at = ("--listen", self.address, "--out", str(self.run), "--no-report")
        command = [sys.executable, "-m", "fedloom", "aggregator", str(self.experiment), *at, *trust, *more]
        self.aggregator = self._process(command, "aggregator.log")
        until(lambda: self._listens(), "the aggregator listens")

    def join(self) -> None:
        """Start the peers."""
        n = self.workers
        for i in range(PROCESSES):
            first, last = i * n // PROCESSES, (i + 1) * n // PROCESSES
            peers = str(Path(__file__).with_name("peers.py"))
            self._process([sys.executable, peers, str(self.folder), str(first), str(last - first)], f"peers-{i}.log")

    def _process(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        out = self._held.enter_context((self.folder / log).open("ab"))
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

        def end() -> None:
            process.kill()
            process.wait()

        self._held.callback(end)
        return process

    def _listens(self) -> bool:
        assert self.aggregator is not None
        if self.aggregator.poll() is not None:
            raise SystemExit((self.folder / "aggregator.log").read_text())
        with socket.socket() as probe:
            host, _, port = self.address.rpartition(":")
            return probe.connect_ex((host, int(port))) == 0

    @property
    def pid(self) -> int:
        """Process id of the aggregator."""
        assert self.aggregator is not None
        return self.aggregator.pid

    def rounds(self) -> int:
        """Return the last completed round."""
        found = [line["round"] for line in self._last_lines() if line["outcome"] == "done"]
        return max(found, default=0)

    def _last_lines(self) -> Iterator[dict[str, Any]]:
        path = self.run / "journal.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - (1 << 18)))
                lines = file.read().rpartition(b"\n")[0].splitlines()
            yield from (json.loads(line) for line in lines[-3:] if line.startswith(b'{"round"'))

    def joins(self) -> list[float]:
        """Return the times when workers joined, in seconds since 1970."""
        path = self.run / "logs" / "audit.jsonl"
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [datetime.fromisoformat(line["time"]).timestamp() for line in told if line["event"] == "join"]

    def descriptors(self) -> int:
        """Return the number of the aggregator's open file descriptors."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())


def parameters(hidden: int | None) -> int:
    """Return the size of the model: logistic regression, or a perceptron with hidden units."""
    inputs, size = (FEATURES, 0) if hidden is None else (hidden, hidden * (FEATURES + 1))
    return size + CLASSES * (inputs + 1)


def _experiment(clients: int, cohort: int, hidden: int | None) -> dict[str, Any]:
    given = {"mean": [0.0] * FEATURES, "std": [1.0] * FEATURES}
    own = {"kind": "features", "input_shape": [FEATURES], "classes": ["no", "yes"], "normalization": given}
    federation = {"rounds": None, "clients_per_round": cohort, "min_clients": clients, "deadline_s": 120}
    return {
        "name": "scale",
        "data": {"own": own},
        "model": {"name": "logistic"} if hidden is None else {"name": "mlp", "hidden": [hidden]},
        "algorithm": {"name": "fedavg", "local": {"steps": 1}},
        "federation": {**federation, "heartbeat_timeout_s": 300, "checkpoint_every_s": 2},
        "evaluation": {"every": 1_000_000, "cohort": 1000},
    }


def _template(message: Message) -> tuple[str, str]:
    """Return a peer's answer for one row: Begin without addresses, and the bytes, in hex."""
    encoded = encode(message)
    begin = wire.Begin(
        envelope=wire.Envelope(message=encoded.name, tensors=specs_to_wire(encoded.specs)), total_bytes=encoded.nbytes
    )
    return begin.SerializeToString().hex(), b"".join(encoded.buffers).hex()


def until(condition: Callable[[], object], what: str) -> float:
    """Wait for a condition; return the time when it held."""
    ends = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > ends:
            raise SystemExit(f"never happened: {what}")
        time.sleep(0.05)
    return time.time()


def measure_workers(
    folder: Path, workers: int, clients: int, cohort: int, rounds: int, hidden: int | None
) -> dict[str, Any]:
    """Measure 1,000 workers and 100,000 clients."""
    with ExitStack() as held:
        federation = Federation(folder, workers, clients, cohort, held, hidden)
        federation.start()
        found: dict[str, Any] = {"workers": workers, "clients": workers * clients, "cohort": cohort}
        found["parameters"] = parameters(hidden)
        found["rss_alone"] = resident_bytes(federation.pid)
        federation.join()
        until(lambda: len(federation.joins()) >= workers, "all workers join")
        joins = sorted(federation.joins())
        found["join_s"] = joins[-1] - joins[0]
        some = joins[workers // 5 : -workers // 5]  # the peers' processes start and end at different times
        found["joins_per_s"] = (len(some) - 1) / (some[-1] - some[0])
        found["rss_joined"] = resident_bytes(federation.pid)
        found["descriptors"] = federation.descriptors()
        journal = federation.run / "journal.jsonl"
        evaluated = until(lambda: journal.exists() and journal.stat().st_size, "the first evaluation")
        found["evaluation_s"] = evaluated - joins[-1]
        found["journal_of_evaluation"] = journal.stat().st_size
        found |= _rounds(federation, rounds)
        found["rss_rounds"] = resident_bytes(federation.pid)
        found["rss_peak"] = resident_bytes(federation.pid, "VmHWM")
        before, joined = federation.rounds(), len(federation.joins())
        assert federation.aggregator is not None
        federation.aggregator.kill()
        federation.aggregator.wait()
        killed = time.time()
        federation.start("--resume")
        found["listens_again_s"] = time.time() - killed
        until(lambda: len(federation.joins()) >= joined + workers, "all workers are back")
        found["all_back_s"] = max(federation.joins()) - killed
        found["goes_on_s"] = until(lambda: federation.rounds() > before, "rounds go on") - killed
        return found


def _rounds(federation: Federation, rounds: int) -> dict[str, float]:
    """Return seconds and CPU time of a round, all included, without the first rounds."""
    at = until(lambda: federation.rounds() >= 3, "rounds")
    first, used = federation.rounds(), cpu_s([federation.pid])
    ends = until(lambda: federation.rounds() >= first + rounds, "more rounds")
    made = federation.rounds() - first
    return {"round_s": (ends - at) / made, "round_cpu_s": (cpu_s([federation.pid]) - used) / made}


def measure_rounds(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure 20,000 rounds."""
    with ExitStack() as held:
        federation = Federation(folder, PROCESSES, 1, PROCESSES, held)
        federation.start()
        federation.join()
        samples = []
        for tenth in (1, 2, 8, 9, 10):
            until(lambda tenth=tenth: federation.rounds() >= rounds * tenth // 10, f"{tenth} tenths")  # type: ignore[misc]
            samples.append(
                {
                    "round": federation.rounds(),
                    "at": time.time(),
                    "cpu_s": cpu_s([federation.pid]),
                    "rss": resident_bytes(federation.pid),
                    "descriptors": federation.descriptors(),
                    "journal": (federation.run / "journal.jsonl").stat().st_size,
                }
            )
        before = federation.rounds()
        assert federation.aggregator is not None
        federation.aggregator.kill()
        federation.aggregator.wait()
        killed = time.time()
        federation.start("--resume")
        listens = time.time() - killed
        goes_on = until(lambda: federation.rounds() > before, "rounds go on") - killed
        return {"samples": samples, "listens_again_s": listens, "goes_on_s": goes_on}


def _table_of_workers(found: dict[str, Any]) -> str:
    def all_of(form: str, factor: float, *keys: str) -> str:
        return ", ".join(format(factor * found[key], form) for key in keys)

    rows = [
        ("workers, clients, cohort, parameters", all_of(",", 1, "workers", "clients", "cohort", "parameters")),
        ("all workers join, s; joins a second in between", all_of(".1f", 1, "join_s", "joins_per_s")),
        ("evaluation of all clients, s", all_of(".1f", 1, "evaluation_s")),
        ("a round, ms; processor time of the aggregator, ms", all_of(".0f", 1e3, "round_s", "round_cpu_s")),
        (
            "memory: alone, all joined, after rounds, peak, MiB",
            all_of(".0f", 1 / MIB, "rss_alone", "rss_joined", "rss_rounds", "rss_peak"),
        ),
        ("descriptors", all_of(",", 1, "descriptors")),
        (
            "killed: listens again, all workers back, rounds go on, s",
            all_of(".1f", 1, "listens_again_s", "all_back_s", "goes_on_s"),
        ),
    ]
    return table(("", ""), rows)


def _table_of_rounds(found: dict[str, Any]) -> str:
    rows, samples = [], found["samples"]
    for before, now in pairwise(samples):
        made = now["round"] - before["round"]
        wall, used = now["at"] - before["at"], now["cpu_s"] - before["cpu_s"]
        figures = (
            f"{1e3 * wall / made:.2f}",
            f"{1e3 * used / made:.2f}",
            f"{now['rss'] / MIB:.1f}",
            now["descriptors"],
        )
        rows.append((f"{before['round']:,} to {now['round']:,}", *figures, f"{now['journal'] / MIB:.2f}"))
    head = ("rounds", "a round, ms", "processor time, ms", "memory, MiB", "descriptors", "journal, MiB")
    said = (
        f"killed: listens again after {found['listens_again_s']:.1f} s, rounds go on after {found['goes_on_s']:.1f} s"
    )
    return f"{table(head, rows)}\n\n{said}"


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("workers", "rounds"), help="part to run; by default both")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=100, help="clients of each worker")
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--hidden", type=int, help="hidden units of the model of the part `workers`")
    parser.add_argument(
        "--rounds", type=int, default=20_000, help="rounds of the part `rounds`; the part `workers` runs 20"
    )
    parser.add_argument("--folder", type=Path, help="new folder for all files, which are kept")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    about = machine()
    print(describe(about))
    folder = options.folder or Path(tempfile.mkdtemp())
    results = {}
    try:
        for part in ("workers", "rounds") if options.part is None else (options.part,):
            (folder / part).mkdir(parents=True)
            if part == "workers":
                sizes = (options.workers, options.clients, options.cohort)
                results[part] = measure_workers(folder / part, *sizes, 20, options.hidden)
                print(_table_of_workers(results[part]))
            else:
                results[part] = measure_rounds(folder / part, options.rounds)
                print(_table_of_rounds(results[part]))
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    write_json(options.json, about, results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
