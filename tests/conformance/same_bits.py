"""Compare the bits of every method between two commits, on this machine.

    .venv/bin/python tests/conformance/same_bits.py BEFORE [AFTER] [--only METHOD ...]

trains each method for three rounds as both commits do (test_kept_bits.py of each) and prints the methods whose final
checkpoint or metrics differ. AFTER is the working tree unless it is given. Exits with 1 where something differs. Names
of tensors and of metrics do not count, so that a change that only renames compares equal. Methods and settings that one
of the commits does not have are listed and left out of the comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path("tests/conformance/kept_bits.json")
TEST = "tests/conformance/test_kept_bits.py"
NO_TESTS = 5
"""Exit code of pytest where no test has one of the names."""


def entry_points(checkout: Path, folder: Path) -> None:
    """Write the entry points of a checkout like those of an installed package, so that they take precedence over it."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    about = folder / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *map(" = ".join, points.items()))]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")


def bits(checkout: Path, only: Sequence[str]) -> dict[str, Any]:
    """Train all or some methods of a checkout and return the digests by method; restore its kept_bits.json."""
    kept = (checkout / KEPT).read_bytes()
    command = [sys.executable, "-m", "pytest", "-q", TEST, "--keep-bits"]
    if only:
        command += ["-k", " or ".join(f"[{name}]" for name in only)]
    with tempfile.TemporaryDirectory() as folder:
        entry_points(checkout, Path(folder))
        places = os.pathsep.join([folder, str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            (checkout / KEPT).unlink()
            done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
            if done.returncode == NO_TESTS:
                return {}
            if done.returncode:
                sys.exit(f"{checkout}: the methods do not run:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
            found: dict[str, Any] = json.loads((checkout / KEPT).read_text())["bits"]
            for digests in found.values():
                digests.pop("version", None)
        finally:
            (checkout / KEPT).write_bytes(kept)
    return found


def bits_of(commit: str | None, only: Sequence[str]) -> dict[str, Any]:
    """Return the digests of a commit, from a temporary worktree; None means the working tree."""
    if commit is None:
        return bits(ROOT, only)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", checkout, commit], check=True)
        try:
            return bits(checkout, only)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", checkout], check=True)


def main() -> int:
    """Print a line for each method that differs or is missing in one commit, and a summary."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("before")
    arguments.add_argument("after", nargs="?")
    arguments.add_argument("--only", nargs="+", default=[], metavar="METHOD", help="methods, or method:setting")
    given = arguments.parse_args()
    before, after = bits_of(given.before, given.only), bits_of(given.after, given.only)
    shared = sorted(before.keys() & after.keys())
    for commit, lacking in ((given.before, after.keys() - before.keys()), (given.after, before.keys() - after.keys())):
        for name in sorted(lacking):
            print(f"{name}: not there in {commit or 'the working tree'}")
    differing = [name for name in shared if before[name] != after[name]]
    for name in differing:
        parts = [part for part in ("state", "metrics") if before[name][part] != after[name][part]]
        print(f"{name}: {' and '.join(parts)} differ")
    alone = len(before.keys() ^ after.keys())
    print(f"{len(shared) - len(differing)} methods and settings have equal bits, {len(differing)} have not", end="")
    print(f", {alone} are in one commit only" if alone else "")
    return int(bool(differing) or not shared)


if __name__ == "__main__":
    sys.exit(main())
