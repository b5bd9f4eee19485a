"""Cost of a round whose clients answer at once, relative to moving its bytes over a bare gRPC stream.

    .venv/bin/python research/benchmarks/aggregator_overhead.py [--case CLIENTS COHORT D] [--json FILE]
    .venv/bin/python research/benchmarks/aggregator_overhead.py --tls [--json FILE]

A round is FedLoom's own (``RoundAttempt`` with a ``ServerAlgorithm``, over ``Aggregator`` to worker processes, and a
line of the journal): sampling, batching, encoding, frames, checksums, validation, decoding, stacking. Each client gets
its own model and answers with as many bytes (``echo.py``). The bare stream (``bare.py``) moves the same bytes to as
many processes and back. Both take turns, so that both see the same machine; the figure is the median of their ratios.
The ratio of CPU time, summed over all processes of each, depends less on other work on the machine.

With ``--tls``, rounds over mutual TLS take turns with rounds in plaintext instead, and the bytes of their sockets are
counted (without TCP and IP headers).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count, groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from bare import IN_TURN, PIPELINED, Bare
from common import MIB, cpu_s, descendants, describe, machine, socket_bytes, spread, table, write_json
from echo import ECHO, EchoServer, federation, names

from fedloom.federation.cohort import RoundConfig
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.validation import out_of_range
from fedloom.messages import Message, answer_shapes
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Attempt, Journal
from fedloom.transport.aggregator import Aggregator

GOAL = (100, 100, 85_822)  # clients, cohort, d: the case that docs/benchmarks.md compares with 1.5
SMALLEST = (10, 5, 7_850)


def judge(client: str, answer: Message) -> str | None:
    """Return why an answer is implausible, as the loop does; None if it is plausible."""
    return out_of_range(answer, {})


class Rounds:
    """Rounds of an echo federation, made as in ``federation.loop``."""

    def __init__(self, aggregator: Aggregator, clients: int, cohort: int, d: int, folder: Path) -> None:
        theta = torch.randn(cohort, d, generator=torch.Generator().manual_seed(1))
        self.bytes = theta.nbytes
        self._server = EchoServer(theta)
        self._roster = names(clients)
        self._sizes = dict.fromkeys(self._roster, 100)
        self._aggregator = aggregator
        self._rules = RoundConfig(
            1, cohort, 60.0, cohort, answer_shapes(ECHO.messages, self._server.sizes), threading.Event(), judge
        )
        self._helper = ThreadPoolExecutor(1)
        self._journal = Journal(RunFolder(folder))

    def make(self, number: int) -> float:
        """Run one round; return its seconds, without the check that the echo is right."""
        attempt = Attempt(number, 1)
        started = time.perf_counter()
        session = RoundAttempt(attempt, "train", self._roster, self._sizes, self._aggregator, self._rules, self._helper)
        try:
            attempt.statistics = self._server.train_round(session)
        finally:
            session.close()
        self._journal.append(attempt)
        seconds = time.perf_counter() - started
        if not torch.equal(self._server.received, self._server.state["theta"]):
            raise RuntimeError("an echo that is not what was sent")
        return seconds


def measure(
    aggregator: Aggregator, bare: Bare, case: tuple[int, int, int], seconds: float, numbers: Iterator[int]
) -> dict[str, Any]:
    """Measure rounds and bare transfers in turn, for this many seconds but at least five times."""
    clients, cohort, d = case
    figures: dict[str, list[float]] = {"round": [], "pipelined": [], "in turn": []}
    cpu: dict[str, list[float]] = {name: [] for name in figures}
    processes = descendants(os.getpid())

    def take(what: str, act: Callable[[], float]) -> None:
        before = cpu_s(processes)
        figures[what].append(act())
        cpu[what].append(cpu_s(processes) - before)

    with tempfile.TemporaryDirectory() as scratch:
        rounds = Rounds(aggregator, clients, cohort, d, Path(scratch))
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends or len(figures["round"]) < 6:
            take("round", lambda: rounds.make(next(numbers)))
            take("pipelined", lambda: bare.transfer(rounds.bytes, PIPELINED))
            take("in turn", lambda: bare.transfer(rounds.bytes, IN_TURN))
        size = rounds.bytes
    figures = {name: values[1:] for name, values in figures.items()}  # the first warms up
    ratios = {
        how: [a / b for a, b in zip(figures["round"], figures[how], strict=True)] for how in ("pipelined", "in turn")
    }
    return {
        "clients": clients,
        "cohort": cohort,
        "d": d,
        "bytes": size,
        "seconds": figures,
        "cpu_s": {name: sum(values[1:]) for name, values in cpu.items()},
        "ratios": ratios,
    }


def measure_tls(
    both: Mapping[str, Aggregator], case: tuple[int, int, int], seconds: float, numbers: Iterator[int]
) -> dict[str, Any]:
    """Measure rounds in plaintext and over TLS in turn, for this many seconds but at least five times."""
    clients, cohort, d = case
    taken: dict[str, list[float]] = {name: [] for name in both}
    moved: dict[str, list[int]] = {name: [] for name in both}
    with ExitStack() as held:
        rounds = {
            name: Rounds(aggregator, clients, cohort, d, Path(held.enter_context(tempfile.TemporaryDirectory())))
            for name, aggregator in both.items()
        }
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends or min(map(len, taken.values())) < 6:
            for name, each in rounds.items():
                before = socket_bytes()
                taken[name].append(each.make(next(numbers)))
                moved[name].append(socket_bytes() - before)
        size = rounds["plaintext"].bytes
    ratios = [a / b for a, b in zip(taken["TLS"][1:], taken["plaintext"][1:], strict=True)]
    bytes_ = {name: sorted(values)[len(values) // 2] for name, values in moved.items()}
    figures = {name: values[1:] for name, values in taken.items()}
    return {"case": case, "bytes": size, "moved": bytes_, "seconds": figures, "ratios": ratios}


def compare_tls(chosen: Sequence[tuple[int, int, int]], workers: int, seconds: float) -> list[dict[str, Any]]:
    """Measure the cost of TLS in all cases."""
    results, numbers = [], count(1)
    for clients, some in groupby(sorted(chosen, key=lambda case: case[0]), key=lambda case: case[0]):
        with ExitStack() as held:
            files = Path(held.enter_context(tempfile.TemporaryDirectory()))
            both = {
                "plaintext": held.enter_context(federation(ECHO, clients, workers)),
                "TLS": held.enter_context(federation(ECHO, clients, workers, files)),
            }
            for case in some:
                results.append({"workers": workers, **measure_tls(both, case, seconds, numbers)})
                print(".", end="", flush=True)
    return results


def cases() -> list[tuple[int, int, int]]:
    """Return the goal's case, then cases that vary clients, cohort and d one at a time, then the corners."""
    varied = [SMALLEST, (100, 5, 7_850), (1000, 5, 7_850)]
    return [
        GOAL,
        *varied,
        *((1000, cohort, 7_850) for cohort in (20, 100)),
        *((100, cohort, d) for d in (85_822, 1_000_000) for cohort in (5, 20, 100) if (100, cohort, d) != GOAL),
    ]


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each case")
    parser.add_argument("--goal-only", action="store_true", help="only measure 100 clients of 85,822 parameters")
    parser.add_argument("--smallest", action="store_true", help="only measure 10 clients of 7,850 parameters")
    parser.add_argument("--case", type=int, nargs=3, metavar=("CLIENTS", "COHORT", "D"), help="only measure this case")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help="worker processes")
    parser.add_argument("--tls", action="store_true", help="compare rounds over TLS with rounds in plaintext")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    print(describe(about))
    chosen = [GOAL] if options.goal_only else [SMALLEST] if options.smallest else cases()
    if options.case:
        clients, cohort, d = options.case
        chosen = [(clients, cohort, d)]
    if options.tls:
        results = [result for n in options.workers for result in compare_tls(chosen, n, options.seconds)]
        head = ["workers", "clients", "cohort", "d", "MiB each way", "plaintext, ms", "TLS, ms", "ratio", "bytes"]
        print("\n\n" + table(head, [_tls_line(result) for result in results]))
        print("\nmedian (lowest-highest); bytes: of TLS's sockets, more than of plaintext's")
        write_json(options.json, about, results)
        return
    results = []
    for workers in options.workers:
        numbers = count(1)
        bare = Bare(workers)
        for clients, some in groupby(sorted(chosen, key=lambda case: case[0]), key=lambda case: case[0]):
            with federation(ECHO, clients, workers) as aggregator:
                for case in some:
                    results.append({"workers": workers, **measure(aggregator, bare, case, options.seconds, numbers)})
                    print(".", end="", flush=True)
        bare.stop()
    print("\n")
    head = [
        "workers",
        "clients",
        "cohort",
        "d",
        "MiB each way",
        "round, ms",
        "bare, ms",
        "ratio",
        "ratio, in turn",
        "CPU",
    ]
    print(table(head, [_line(result) for result in results]))
    print("\nmedian (lowest-highest); bare: both directions at once; CPU: of all processes, ratio to bare, in turn")
    write_json(options.json, about, results)


def _tls_line(result: dict[str, Any]) -> list[str]:
    seconds, moved = result["seconds"], result["moved"]
    return [
        f"{result['workers']}",
        *(f"{number:,}" for number in result["case"]),
        f"{result['bytes'] / MIB:.1f}",
        *(spread([1e3 * s for s in seconds[name]], "{:.1f}") for name in ("plaintext", "TLS")),
        spread(result["ratios"]),
        f"{100 * (moved['TLS'] / moved['plaintext'] - 1):+.2f} %",
    ]


def _line(result: dict[str, Any]) -> list[str]:
    seconds, ratios = result["seconds"], result["ratios"]
    return [
        *(f"{result[key]:,}" for key in ("workers", "clients", "cohort", "d")),
        f"{result['bytes'] / MIB:.1f}",
        spread([1e3 * s for s in seconds["round"]], "{:.1f}"),
        spread([1e3 * s for s in seconds["pipelined"]], "{:.1f}"),
        spread(ratios["pipelined"]),
        spread(ratios["in turn"]),
        f"{result['cpu_s']['round'] / max(result['cpu_s']['in turn'], 0.01):.2f}",
    ]


if __name__ == "__main__":
    main()
