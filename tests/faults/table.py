"""Faults, their trials and guarantees, and the table of all of them."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faults.place import Place


@dataclass(frozen=True)
class Tried:
    """Result of a successful trial: number of faults in it, and its measurements."""

    times: int = 1
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes
    ----------
    name, kind
        Selectors of the fault, alone or with others.
    fault, promise
        Texts of the table.
    trial
        Tries the fault once, with all randomness from the given generator; raises if the guarantee is violated.
    goal
        Number of trials of a long run, by which the fault gets its share of the time.
    short
        Number of trials in ``make test``.
    needs_store
        The trial needs S3.
    """

    name: str
    kind: str
    fault: str
    promise: str
    trial: Callable[[Place, Random], Tried]
    goal: int
    short: int = 0
    needs_store: bool = False


@dataclass
class Tally:
    """Counts of the trials of one fault."""

    trials: int = 0
    kept: int = 0
    times: int = 0
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)

    def add(self, seed: int, seconds: float, outcome: Tried | str) -> None:
        """Count a trial, or the reason of its failure; keep the largest measurements (``least``: the smallest)."""
        self.trials += 1
        self.seconds += seconds
        if isinstance(outcome, str):
            self.failures.append({"seed": seed, "why": outcome[:1000]})
            return
        self.kept += 1
        self.times += outcome.times
        for name, value in outcome.measured.items():
            better = min if name.startswith("least") else max
            self.measured[name] = better(self.measured.get(name, value), value)


def try_once(fault: Fault, place: Place, seed: int) -> tuple[Tried | Exception, float]:
    """Run one trial; return the seconds it took."""
    started = time.monotonic()
    outcome: Tried | Exception
    try:
        outcome = fault.trial(place, Random(f"{fault.name}/{seed}"))
    except Exception as error:
        outcome = error
    return outcome, time.monotonic() - started


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = Counter(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = next(iter(kinds), platform.machine())
    return {"processor": processor, "cores": os.cpu_count(), "memory_gib": round(memory), "system": platform.system()}


def summary(faults: Mapping[Fault, Tally], command: str, minutes: float) -> dict[str, Any]:
    """Return the content of ``summary.json``."""
    rows = {
        fault.name: {"kind": fault.kind, "fault": fault.fault, "promise": fault.promise, **asdict(tally)}
        for fault, tally in faults.items()
        if tally.trials
    }
    sitting = {"command": command, "minutes": round(minutes, 1), "machine": machine()}
    return {"sittings": [sitting], "faults": {name: {"sitting": 0, **row} for name, row in rows.items()}}


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table of a summary; rows of several sessions are marked."""
    several = len(found["sittings"]) > 1
    lines = []
    for number, sitting in enumerate(found["sittings"], 1):
        on = sitting["machine"]
        lines.append(
            f"{f'{number}. ' * several}`{sitting['command']}`: {sitting['minutes']:g} minutes on {on['cores']} cores "
            f"({on['processor']}, {on['memory_gib']} GiB, {on['system']})"
        )
    lines += ["", "| fault | promise | faults | trials | kept | measured |", "|---|---|---:|---:|---:|---|"]
    for row in found["faults"].values():
        measured = ", ".join(f"{name} {value:,.4g}" for name, value in row["measured"].items())
        counts = " | ".join(f"{row[name]:,}" for name in ("times", "trials", "kept"))
        mark = f" [{row['sitting'] + 1}]" * several
        lines.append(f"| {row['fault']}{mark} | {row['promise']} | {counts} | {measured} |")
    failures = [(name, failure) for name, row in found["faults"].items() for failure in row["failures"]]
    if failures:
        lines += ["", "Not kept:", ""]
        lines += [f"- `make faults KINDS={n} SEED={f['seed']} TRIES=1`: {f['why'][:200]}" for n, f in failures]
    return "\n".join(lines) + "\n"


def write(folder: Path, found: Mapping[str, Any]) -> None:
    """Write summary and table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    (folder / "table.md").write_text(markdown(found))


DOCS = Path(__file__).parents[2] / "docs"


def keep(out: Path) -> None:
    """Put the rows of a session into the page about faults, and into the recorded summary; keep other rows."""
    page, kept = DOCS / "e2e.md", DOCS / "results" / "faults.json"
    new = json.loads((out / "summary.json").read_text())
    old = json.loads(kept.read_text()) if kept.exists() else {"sittings": [], "faults": {}}
    sittings = [*old["sittings"], *new["sittings"]]
    rows = {name: {**row, "sitting": len(old["sittings"])} for name, row in new["faults"].items()}
    rows = {**old["faults"], **rows}
    used = sorted({row["sitting"] for row in rows.values()})
    rows = {name: {**row, "sitting": used.index(row["sitting"])} for name, row in rows.items()}
    found = {"sittings": [sittings[number] for number in used], "faults": rows}
    before, begin, rest = page.read_text().partition("<!-- table -->")
    _, end, after = rest.partition("<!-- /table -->")
    page.write_text(f"{before}{begin}\n{markdown(found)}{end}{after}")
    kept.write_text(in_lines(found))


def in_lines(found: Mapping[str, Any]) -> str:
    """Return JSON with one line for each session and each fault, so that a diff shows the changes of a session."""
    sittings = ",\n".join(json.dumps(sitting, ensure_ascii=False) for sitting in found["sittings"])
    rows = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}" for name, row in found["faults"].items()
    )
    return f'{{"sittings": [\n{sittings}\n],\n"faults": {{\n{rows}\n}}}}\n'
