"""``make faults``: inject random faults for a number of minutes, and write the results."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.pool import AsyncResult
from pathlib import Path

import s3_support

from faults.all import FAULTS, prepare, try_named
from faults.table import Fault, Tally, Tried, keep, summary, write
from fedloom.data import datasets
from fedloom.data.folders import data_root


def chosen(kinds: str) -> list[Fault]:
    """Return the faults of these kinds or names; by default all."""
    wanted = kinds.replace(",", " ").split()
    known = {name for fault in FAULTS for name in (fault.kind, fault.name)}
    for word in wanted:
        if word not in known:
            sys.exit(f"KINDS: found {word!r}, allowed: {', '.join(sorted(known))}")
    return [fault for fault in FAULTS if not wanted or fault.kind in wanted or fault.name in wanted]


def main() -> None:
    """Run the command; the exit code is 0 if every guarantee held."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tries", type=int, default=0, help="so many of each, however long it takes")
    parser.add_argument("--rounds", type=int, default=25_000, help="of the endurance trial")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at once")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--keep", action="store_true", help="put the table into docs/e2e.md, beside its summary")
    given = parser.parse_args()
    tallies = {fault: Tally() for fault in chosen(given.kinds)}
    begun = dict.fromkeys(tallies, 0)
    datasets.fetch_dataset(datasets.find_dataset("fashion-mnist"), data_root())
    command = f"make faults MINUTES={given.minutes:g}"
    command += f" KINDS={shlex.quote(given.kinds)}" * bool(given.kinds) + f" SEED={given.seed} JOBS={given.jobs}"
    command += f" TRIES={given.tries}" * bool(given.tries)
    started = time.monotonic()

    def following() -> Fault | None:
        """Return the next fault to try; None once time is up."""
        due = [fault for fault in tallies if not given.tries or begun[fault] < given.tries]
        if not due or (not given.tries and time.monotonic() - started > 60 * given.minutes):
            return None
        return min(due, key=lambda fault: (begun[fault] + 0.5) / (1 if given.tries else fault.goal))

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedloom-faults-")))
        (folder / "data").mkdir()
        (folder / "data" / "datasets").symlink_to(data_root().resolve() / "datasets")
        s3 = None
        if any(fault.needs_store for fault in tallies):
            (folder / "s3").mkdir()
            s3 = stack.enter_context(s3_support.serving(folder / "s3"))
        pool = multiprocessing.get_context("spawn").Pool(
            given.jobs, prepare, (folder, folder / "data", s3, given.rounds)
        )
        stack.enter_context(pool)
        running: dict[AsyncResult[tuple[Tried | str, float]], tuple[Fault, int]] = {}
        while True:
            while len(running) < given.jobs and (fault := following()) is not None:
                seed = given.seed + begun[fault]
                begun[fault] += 1
                running[pool.apply_async(try_named, (fault.name, seed))] = fault, seed
            if not running:
                break
            time.sleep(0.05)
            for done in [result for result in running if result.ready()]:
                fault, seed = running.pop(done)
                outcome, seconds = done.get()
                tallies[fault].add(seed, seconds, outcome)
                output = f"{outcome.times} times" if isinstance(outcome, Tried) else f"NOT KEPT: {outcome:.300}"
                at = time.monotonic() - started
                print(f"{at:7.1f} s  {fault.name}, seed {seed}: {output}, {seconds:.1f} s", flush=True)
                write(given.out, summary(tallies, command, at / 60))
    print(f"\n{(given.out / 'table.md').read_text()}")
    if given.keep:
        keep(given.out)
    sys.exit(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    main()
