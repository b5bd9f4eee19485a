"""Very many rounds: the last ones cost as much as the first."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults.attacks import finite
from faults.kills import Federation, new_url
from faults.place import Broken, Place, Running, durable, wait_until
from faults.table import Fault, Tried

LONGEST_S = 3600.0
GROWTH_MB = 25.0
SLOWER = 1.3
"""Largest CPU time of the last tenth of the rounds, as a multiple of the second tenth."""


@dataclass
class Sample:
    """Measurements of a run at one moment."""

    round: int
    at: float
    memory_mb: dict[str, float]
    descriptors: dict[str, int]
    processor_s: dict[str, float]


def sample(run: Federation) -> Sample:
    """Measure the aggregator and its worker."""
    processes = run.processes.items()
    return Sample(
        durable(run.out),
        time.monotonic(),
        {name: _resident_mb(process) for name, process in processes},
        {name: process.descriptors() for name, process in processes},
        {name: _processor_s(process) for name, process in processes},
    )


def _resident_mb(process: Running) -> float:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _processor_s(process: Running) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def endure(place: Place, random: Random) -> Tried:
    """Run a publishing aggregator and a worker for very many rounds; then kill and resume the aggregator."""
    del random
    rounds = place.rounds
    experiment = place.experiment("fedavg", every=rounds, rounds=rounds, checkpoint_every_s=2.0)
    with ExitStack() as stack:
        run = Federation(place, experiment, stack, workers=1, url=new_url(place) if place.s3 else None)

        def at(round: int) -> Sample:
            wait_until(lambda: durable(run.out) >= round or run.over(), f"round {round}", LONGEST_S)
            return sample(run)

        samples = [at(rounds * tenth // 10) for tenth in (1, 2, 8, 9)]
        run.aggregator.kill()
        before, killed = durable(run.out), time.monotonic()
        run.over()  # starts it again
        wait_until(lambda: durable(run.out) > before, "a round after the resumption", LONGEST_S)
        resumed_s = time.monotonic() - killed
        wait_until(run.over, "the end", LONGEST_S)
    finite(run.out)
    if durable(run.out) != rounds:
        raise Broken(f"the last checkpoint is of round {durable(run.out)}, not {rounds}")
    first, last = (_per_round(*samples[i : i + 2]) for i in (0, 2))
    measured = {"rounds": rounds, "s until a round is durable again": resumed_s}
    for name in samples[0].memory_mb:
        grown = samples[3].memory_mb[name] - samples[0].memory_mb[name]
        more = samples[3].descriptors[name] - samples[0].descriptors[name]
        measured |= {
            f"{name}: MB more": grown, f"{name}: descriptors more": more,
            f"{name}: ms/round at first": first[name], f"{name}: ms/round at last": last[name],
        }  # fmt: skip
        if grown > GROWTH_MB or more > 2 or last[name] > SLOWER * first[name]:
            raise Broken(f"{name} is not flat: {measured}")
    measured["journal bytes/round"] = (run.out / "journal.jsonl").stat().st_size / rounds
    return Tried(1, measured)


def _per_round(start: Sample, end: Sample) -> dict[str, float]:
    """Return milliseconds of processor time per round, by process."""
    n = end.round - start.round
    return {name: 1000 * (end.processor_s[name] - start.processor_s[name]) / n for name in start.processor_s}


FAULTS = (
    Fault(
        "endurance", "endurance", "very many rounds of a published run, which is then killed and resumed",
        "memory, descriptors and time per round are flat", endure, goal=1, needs_store=True,
    ),
)  # fmt: skip
