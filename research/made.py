"""Record of the commands that made a page's runs, in their folder, with the clone's commit at each start."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from page_parts import ROOT, Step
from summaries import Runs

MADE = "made.jsonl"


@cache
def commit() -> str:
    """Return the clone's commit, with ``+`` if its files differ from it; empty if it is not known."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def note(folder: Path, step: Step, *, event: str) -> None:
    """Add a line to the record."""
    folder.mkdir(parents=True, exist_ok=True)
    line = {"out": step.out, "event": event, "commit": commit(), "words": step.words}
    with (folder / MADE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def record(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the record; one that is not whole, as after a kill, is skipped."""
    lines = []
    if (folder / MADE).exists():
        for text in (folder / MADE).read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
                lines.append({"out": str(line["out"]), **line})
            except (ValueError, TypeError, KeyError):
                continue
    return lines


def ended(folder: Path, step: Step) -> bool:
    """Return whether the same command has ended before."""
    mine = [line for line in record(folder) if line["out"] == step.out]
    return any(line.get("event") == "end" and line.get("words") == list(step.words) for line in mine)


def with_commits(folder: Path, runs: Runs) -> Runs:
    """Return runs with the commits that made them, as the record has them."""
    commits: dict[str, dict[str, None]] = {}
    for line in record(folder):
        commits.setdefault(line["out"], {})[str(line.get("commit", ""))] = None
    found = Runs()
    for name, run in runs.items():
        makers = [out for out in commits if name == out or name.startswith(f"{out}/")]
        made = " ".join(filter(None, commits[max(makers, key=len)])) if makers else ""
        found[name] = tuple(replace(line, commit=made) for line in run)
    return found
