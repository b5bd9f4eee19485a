"""Rounds under secure aggregation beside plain ones: a large cohort over the wire, and whole runs of an experiment.

    .venv/bin/python research/benchmarks/secure_rounds.py cohort [--clients N] [--parameters D] [--json FILE]
    .venv/bin/python research/benchmarks/secure_rounds.py run [--rounds N] [--pairs N] [--json FILE]

``cohort``: the aggregator's CPU time, its peak memory and its bytes for rounds of a cohort that answers at once,
through the real cohort and gRPC; the clients are at one worker process (``echo.py``). The second of two rounds counts.

``run``: pairs of runs of FedAvg on ``experiments/quickstart.yaml`` as ``make run`` makes them, in one
process each, with and without ``federation.secure_aggregation``, in turn: wall and CPU time of the whole process, and
of a training round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import MIB, ROOT, describe, machine, resident_bytes, socket_bytes, spread, table, write_json
from echo import SECURE, SUMMED_ECHO, SummedEchoServer, federation, names

from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions
from fedloom.engine.run_experiment import run_experiment
from fedloom.experiment import load_experiment
from fedloom.federation.cohort import RoundConfig
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.messages import answer_shapes
from fedloom.runs.journal import Attempt
from fedloom.sums.summation import Summation
from fedloom.transport.aggregator import Aggregator

EXPERIMENT = ROOT / "experiments" / "quickstart.yaml"
FEDAVG = "{name: fedavg, local: {batch_size: 10, clip: 50.0, steps: 5, lr: 0.03}, personalize_steps: 20}"
AGGREGATION = "{bits: 32, range: 16}"


def cohort_round(aggregator: Aggregator, summation: Summation, number: int, clients: int, d: int) -> dict[str, float]:
    """Run one round with a cohort of all clients, and check its sum; return the aggregator's figures."""
    server = SummedEchoServer(torch.randn(1, d, generator=torch.Generator().manual_seed(1)))
    server.cohort = clients
    shapes = answer_shapes(SUMMED_ECHO.messages, server.sizes)
    stop, roster = threading.Event(), names(clients)
    rules = RoundConfig(1, clients, 3600.0, clients, shapes, stop, lambda client, answer: None, summation=summation)
    attempt = Attempt(number, 1)
    before, sockets, started = time.process_time(), socket_bytes(), time.perf_counter()
    with ThreadPoolExecutor(1) as helper:
        session = RoundAttempt(attempt, "train", roster, dict.fromkeys(roster, 100), aggregator, rules, helper)
        try:
            server.train_round(session)
        finally:
            session.close()
    figures = {
        "cpu_s": time.process_time() - before,
        "wall_s": time.perf_counter() - started,
        "bytes": float(socket_bytes() - sockets),
        "peak": float(resident_bytes(os.getpid(), "VmHWM")),
    }
    if not torch.allclose(server.received, server.state["theta"], atol=1e-4):
        raise RuntimeError("a sum that is not that of the answers")
    return figures


def measure_cohort(clients: int, d: int) -> dict[str, Any]:
    """Measure two rounds of secure sums; the last counts."""
    figures: dict[str, Any] = {}
    with federation(SUMMED_ECHO, clients, 1) as aggregator:
        idle = float(resident_bytes(os.getpid()))
        for number in (1, 2):
            figures["secure sums"] = cohort_round(aggregator, SECURE, number, clients, d)
    for name in figures:
        figures[name]["memory"] = figures[name]["peak"] - idle
    return figures


class RoundClock(RunObserver):
    """CPU time of this process at the end of each round."""

    def __init__(self) -> None:
        self.ends = [0.0]

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Note the time."""
        self.ends.append(time.process_time())


def run_here(out: Path, rounds: int, secure: bool) -> None:
    """Run the quickstart with FedAvg in this process; print the CPU time of each round but the first, as JSON."""
    settings = [f"algorithm={FEDAVG}", f"federation.rounds={rounds}", f"evaluation.every={rounds}", "runtime.workers=0"]
    settings += [f"federation.secure_aggregation={AGGREGATION}"] if secure else []
    clock = RoundClock()
    run_experiment(load_experiment(EXPERIMENT, settings), RunOptions(out, report=False), clock)
    print(json.dumps([end - start for start, end in itertools.pairwise(clock.ends[1:])]))


def run(out: Path, rounds: int, *, secure: bool) -> dict[str, float]:
    """Run the quickstart in a process; return its seconds of wall and CPU time, those of a round, and the payload."""
    command = [sys.executable, __file__, "here", "--out", str(out), "--rounds", str(rounds)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command += ["--secure"] if secure else []
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    after, ended = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    done = [line for line in lines if line["outcome"] == "done"]
    return {
        "wall_s": ended - started,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "round_wall_s": statistics.median(line["seconds"] for line in done),
        "round_cpu_s": statistics.median(json.loads(said.splitlines()[-1])),
        "payload": float(sum(line["payload_up"] + line["payload_down"] for line in done)),
    }


def measure_runs(pairs: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Run pairs, with and without secure aggregation in turn."""
    found: dict[str, list[dict[str, float]]] = {"plain": [], "secure": []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            for name, runs in found.items():
                runs.append(run(Path(folder) / f"{name}-{pair}", rounds, secure=name == "secure"))
    return found


def main() -> None:
    """Measure one of the two, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cohort", "run", "here"])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=180)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--secure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "here":
        run_here(options.out, options.rounds, options.secure)
        return
    about = machine()
    print(describe(about) + "\n")
    figures: Any
    if options.what == "cohort":
        torch.set_num_threads(1)
        figures = measure_cohort(options.clients, options.parameters)
        rows = [
            [
                name,
                f"{f['cpu_s']:.2f}",
                f"{f['wall_s']:.1f}",
                f"{f['memory'] / MIB:.0f}",
                f"{f['bytes'] / options.clients / 1e3:.0f}",
            ]
            for name, f in figures.items()
        ]
        print(table(["", "CPU, s", "wall, s", "memory, MiB", "kB a client"], rows))
    else:
        figures = measure_runs(options.pairs, options.rounds)
        plain, secure = figures["plain"], figures["secure"]
        names_of = {
            "wall_s": "wall time, s",
            "cpu_s": "CPU time, s",
            "round_wall_s": "a round's wall time, s (median)",
            "round_cpu_s": "a round's CPU time, s (median)",
        }
        rows = [
            [
                said,
                *(f"{statistics.median([r[key] for r in runs]):.3f}" for runs in (plain, secure)),
                spread([b[key] / a[key] for a, b in zip(plain, secure, strict=True)]),
            ]
            for key, said in {**names_of, "payload": "payload, bytes"}.items()
        ]
        print(table(["", "plain", "secure", "ratio"], rows))
    write_json(options.json, about, figures)


if __name__ == "__main__":
    main()
