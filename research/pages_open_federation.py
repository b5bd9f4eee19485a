"""Compact file and tables of docs/results/open-federation.md, from results of research/open_federation.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from summaries import Evaluation, Runs, last, table

FOUND = "found.json"
NAMES = ("digits", "vowels")
Found = Mapping[str, Mapping[str, float]]
"""Results of a federation: the numbers of each row of its table."""


def folded(folder: Path) -> Runs:
    """Return ``NAME/WHAT``, the results of a federation with one line per row of its table."""
    runs = Runs()
    for path in sorted(folder.glob(f"*/{FOUND}")):
        found: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
        for what, values in found.items():
            name = f"{path.parent.name}/{what}"
            rounded = {key: float(f"{value:.6g}") for key, value in values.items()}
            runs[name] = (Evaluation(name, "", {}, 0, None, rounded, {}),)
    return runs


def tables(runs: Runs) -> Iterator[str]:
    """Yield a table per federation."""
    for name in NAMES:
        yield of_one({run[0].run.rpartition("/")[2]: last(run).values for run in runs.under(name)})


def of_one(found: Found) -> str:
    """Return the table of one federation: events, their number and their outcome."""
    rounds, killed, come = found["rounds"], found["killed"], found["come"]
    rows = [
        (
            "rounds",
            "rounds",
            f"{rounds['failed']:g} attempts failed; of {rounds['rows']:,.0f} rows {rounds['lost']:g} were lost",
        ),
        (
            "aggregator killed and resumed",
            "killed",
            f"next round {killed['seconds']:.1f} s later (at most {killed['seconds_most']:.1f}); "
            f"{killed['again']:g} rounds ran again (at most {killed['again_most']:g}); "
            f"durable rounds lost: {killed['lost']:g}",
        ),
        ("workers stopped", "leave", "rounds continued with the others"),
        ("workers killed", "crash", "the same"),
        (
            "workers that joined or rejoined",
            "come",
            f"roster: {come['joined']:g} joined, {come['gone']:g} left",
        ),
    ]
    for what, key in (("certificates", "certificates"), ("certificates and the authority", "authority")):
        rotated = found[key]
        back = f"{rotated['members']:g} members reconnected with new ones after {rotated['seconds']:.1f} s"
        rows.append((f"all {what} rotated", key, f"{back}; rows lost: {rotated['lost']:g}"))
    revoked, replay, end = found["revoked"], found["replay"], found["end"]
    out = f"disconnected after {revoked['seconds']:.1f} s, exit code {revoked['exit_code']:g}"
    equal = {key: "equal" if replay[key] else "NOT EQUAL" for key in ("checkpoint", "metrics")}
    rows += [
        ("members revoked", "revoked", f"{out}; requests afterwards: {revoked['later']:g}"),
        (
            "replays of the journal",
            "replay",
            f"last checkpoint: {equal['checkpoint']}; metrics of every evaluation: {equal['metrics']}",
        ),
        ("members at the end", "end", f"test accuracy {end['mean']:.1f} % (worst {end['worst']:.1f} %)"),
    ]
    shown = [(what, f"{found[key]['count']:g}", came) for what, key, came in rows]
    return table(("what", "how often", "result"), shown).replace("---:|---:|", "---:|---|", 1)
