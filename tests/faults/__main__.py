"""``make faults``: try faults at random for so many minutes, and write what became of them."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import s3_support

from faults.all import FAULTS
from faults.place import Place
from faults.table import Fault, Tally, Tried, keep, summary, try_once, write
from fedloom.data import sources
from fedloom.data.folders import data_root


def chosen(kinds: str) -> list[Fault]:
    """The faults of these kinds, or of these names; all without."""
    wanted = [word for word in kinds.replace(",", " ").split() if word]
    known = {name for fault in FAULTS for name in (fault.kind, fault.name)}
    for word in wanted:
        if word not in known:
            sys.exit(f"KINDS: found {word!r}, allowed: {', '.join(sorted(known))}")
    return [fault for fault in FAULTS if not wanted or fault.kind in wanted or fault.name in wanted]


def main() -> None:
    """Run the command; its exit code says whether every promise was kept."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tries", type=int, default=0, help="so many of each, however long it takes")
    parser.add_argument("--rounds", type=int, default=25_000, help="of the endurance trial")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--keep", action="store_true", help="put the table into docs/faults.md, beside its summary")
    given = parser.parse_args()
    faults = chosen(given.kinds)
    logging.getLogger("fedloom").addHandler(logging.NullHandler())  # peers here are refused all the time
    sources.fetch(sources.find("fashion-mnist"), data_root())
    tallies = {fault: Tally() for fault in faults}
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedloom-faults-")))
        root = folder / "data"
        root.mkdir()
        (root / "datasets").symlink_to(data_root().resolve() / "datasets")
        s3 = None
        if any(fault.needs_store for fault in faults):
            (folder / "s3").mkdir()
            s3 = stack.enter_context(s3_support.serving(folder / "s3"))
        place = Place(folder, root, s3, given.rounds)
        while True:
            fault = min(faults, key=lambda fault: (tallies[fault].trials + 0.5) / fault.goal)
            if given.tries:
                if not (left := [fault for fault in faults if tallies[fault].trials < given.tries]):
                    break
                fault = left[0]
            elif time.monotonic() - started > 60 * given.minutes:
                break
            tally = tallies[fault]
            seed = given.seed + tally.trials
            outcome, seconds = try_once(fault, place, seed)
            tally.add(seed, seconds, outcome)
            said = f"{outcome.times} times" if isinstance(outcome, Tried) else f"NOT KEPT: {outcome!s:.300}"
            print(
                f"{time.monotonic() - started:7.1f} s  {fault.name}, seed {seed}: {said}, {seconds:.1f} s", flush=True
            )
            command = f"make faults MINUTES={given.minutes:g} KINDS={shlex.quote(given.kinds)} SEED={given.seed}"
            write(given.out, summary(tallies, command.replace(" KINDS=''", ""), (time.monotonic() - started) / 60))
    print(f"\n{(given.out / 'table.md').read_text()}")
    if given.keep:
        keep(given.out)
    sys.exit(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    main()
