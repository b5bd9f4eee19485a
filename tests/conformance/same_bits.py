"""Compare the bits of every method between two commits, on this machine.

    .venv/bin/python tests/conformance/same_bits.py BEFORE [AFTER]

trains each method for three rounds as both commits do (test_kept_bits.py of each) and prints the methods whose final
checkpoint or metrics differ. AFTER is the working tree unless it is given. Exits with 1 where something differs. Names
of tensors and of metrics do not count, so that a change that only renames compares equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path("tests/conformance/kept_bits.json")
TEST = "tests/conformance/test_kept_bits.py"


def bits(checkout: Path) -> dict[str, Any]:
    """Train every method in a checkout and return the digests by method; its kept_bits.json is put back."""
    kept = (checkout / KEPT).read_bytes()
    places = os.pathsep.join([str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", TEST, "--keep-bits"]
    try:
        (checkout / KEPT).unlink()
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{checkout}: the methods do not run:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads((checkout / KEPT).read_text())["bits"]
    finally:
        (checkout / KEPT).write_bytes(kept)
    return found


def bits_of(commit: str | None) -> dict[str, Any]:
    """Return the digests of a commit, from a temporary worktree; None: of the working tree."""
    if commit is None:
        return bits(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", checkout, commit], check=True)
        try:
            return bits(checkout)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", checkout], check=True)


def main() -> int:
    """Print a line for each method that differs, and a summary."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("before")
    arguments.add_argument("after", nargs="?")
    given = arguments.parse_args()
    before, after = bits_of(given.before), bits_of(given.after)
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in differing:
        parts = [
            part for part in ("state", "metrics") if before.get(name, {}).get(part) != after.get(name, {}).get(part)
        ]
        print(
            f"{name}: {' and '.join(parts)} differ"
            if name in before and name in after
            else f"{name}: in one commit only"
        )
    equal = sum(before.get(name) == found for name, found in after.items())
    print(f"{equal} methods and settings have equal bits, {len(differing)} have not")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
