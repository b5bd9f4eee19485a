"""Timed first use of FedLoom: build a wheel, install it in an empty environment, run a notebook.

    .venv/bin/python research/benchmarks/first_use.py [--uv] [--notebook FILE] [--out FILE] [--json FILE] [REQUIREMENT]

Builds the wheel, creates an empty environment, installs the wheel with the extra ``notebook`` and a notebook runner
(and further requirements, such as another build of torch), and runs docs/tutorials/images.ipynb, or another, in a new
folder: load, partition, PeFLL and FedAvg, a figure, a personalized module on a new image. Data fetched before are
available in $FEDLOOM_DATA. Seconds are wall time and CPU time of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, describe, machine, table, write_json

BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
NOTEBOOK = ROOT / "docs" / "tutorials" / "images.ipynb"
TRIED = """
import importlib.metadata, sys, fedloom
assert not fedloom.__file__.startswith(sys.argv[1]), fedloom.__file__
for group in ("fedloom.algorithms", "fedloom.observers"):
    points = [point for point in importlib.metadata.entry_points(group=group) if point.name != "mlflow"]
    assert points
    for point in points:
        if group == "fedloom.algorithms" or point.name == "csv":
            point.load()
"""


class Parts:
    """Stages of the path and their times."""

    def __init__(self) -> None:
        self.taken: dict[str, tuple[float, float]] = {}

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Run one stage and record its time."""
        wall, cpu = time.perf_counter(), _cpu()
        found = work()
        self.taken[name] = time.perf_counter() - wall, _cpu() - cpu
        return found


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def first_use(folder: Path, notebook: Path, requirements: Sequence[str], *, uv: bool) -> tuple[Parts, str]:
    """Run all stages in an empty folder; return their times and the text of the notebook with its outputs.

    Raises
    ------
    subprocess.CalledProcessError
        If a stage fails, including a cell of the notebook.
    """
    parts, python = Parts(), folder / "venv" / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}

    def call(*command: object, cwd: Path = folder) -> str:
        words = [str(word) for word in command]
        return subprocess.run(words, cwd=cwd, env=clean, check=True, stdout=subprocess.PIPE, text=True).stdout

    built = parts.timed("wheel", lambda: call(sys.executable, "-c", BUILD, folder, cwd=ROOT))
    wheel = f"{folder / built.split()[-1]}[notebook]"
    parts.timed("environment", lambda: venv.create(folder / "venv", with_pip=not uv))
    wanted = [wheel, "nbclient", "ipykernel", *requirements]
    installer = [ROOT / ".venv/bin/uv", "pip", "install", "-q", "--python", python]
    if not uv:
        installer = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    parts.timed("install", lambda: call(*installer, *wanted))
    parts.timed("import of all methods", lambda: call(python, "-c", TRIED, ROOT))
    away = folder / "notebook"
    away.mkdir()
    shutil.copy(notebook, away)
    run = [python.with_name("jupyter-execute"), "--inplace", "--timeout=1800", notebook.name]
    parts.timed("notebook", lambda: call(*run, cwd=away))
    return parts, (away / notebook.name).read_text(encoding="utf-8")


def main() -> None:
    """Run all stages and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "requirements",
        nargs="*",
        metavar="REQUIREMENT",
        help="additional requirement to install, such as torch==2.13.0+cpu",
    )
    parser.add_argument("--uv", action="store_true", help="install with uv instead of pip")
    parser.add_argument("--notebook", type=Path, default=NOTEBOOK, help="notebook to run")
    parser.add_argument("--out", type=Path, help="write the notebook with its outputs to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    about = machine()
    print(describe(about), flush=True)
    with tempfile.TemporaryDirectory(prefix="fedloom-first-use-") as folder:
        parts, notebook = first_use(Path(folder), options.notebook, options.requirements, uv=options.uv)
    if options.out is not None:
        options.out.write_text(notebook, encoding="utf-8")
    cells = [cell for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        for output in cell["outputs"]:
            print("".join(output.get("text", output.get("data", {}).get("text/plain", ""))).rstrip())
    whole = [sum(taken[i] for taken in parts.taken.values()) for i in range(2)]
    rows = [(name, *(f"{s:.1f}" for s in taken)) for name, taken in [*parts.taken.items(), ("all", whole)]]
    print(table(("part", "wall, s", "CPU, s"), rows))
    write_json(options.json, about, parts.taken)


if __name__ == "__main__":
    main()
