"""Timed first use of FedLoom: build a wheel, install it in an empty environment, run a notebook or a page's commands.

    .venv/bin/python research/benchmarks/first_use.py [--uv] [--notebook FILE] [--out FILE] [--json FILE] [REQUIREMENT]
    .venv/bin/python research/benchmarks/first_use.py --project [--uv] [--json FILE] [REQUIREMENT]

Builds the wheel, creates an empty environment, installs the wheel with the extra ``notebook`` and a notebook runner
(and further requirements, such as another build of torch), and runs docs/tutorials/images.ipynb, or another, in a new
folder: load, partition, PeFLL and FedAvg, a figure, a personalized module on a new image. Data fetched before are
available in $FEDLOOM_DATA. With ``--project`` it follows docs/tutorials/your-own-project.md instead, from the script to
the first trained models. Seconds are wall time and CPU time of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, describe, machine, table, write_json

BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
NOTEBOOK = ROOT / "docs" / "tutorials" / "images.ipynb"
PROJECT = ROOT / "docs" / "tutorials" / "your-own-project.md"
SECTION = "## From the command line\n"
BLOCK = re.compile(r"^```(?:sh|python title=\"([\w.]+)\")\n(.*?)^```$", re.DOTALL | re.MULTILINE)
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


def first_use(folder: Path, notebook: Path | None, requirements: Sequence[str], *, uv: bool) -> tuple[Parts, str]:
    """Run all stages in an empty folder; return their times and the text of the notebook with its outputs.

    Without a notebook, follow the page on a project of one's own; the text is then empty.

    Raises
    ------
    subprocess.CalledProcessError
        If a stage fails, including a cell of the notebook.
    """
    parts, python = Parts(), folder / "venv" / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }

    def call(*command: object, cwd: Path = folder) -> str:
        words = [str(word) for word in command]
        return subprocess.run(words, cwd=cwd, env=clean, check=True, stdout=subprocess.PIPE, text=True).stdout

    built = parts.timed("wheel", lambda: call(sys.executable, "-c", BUILD, folder, cwd=ROOT))
    wheel = f"{folder / built.split()[-1]}[{'notebook' if notebook else 'vision'}]"
    parts.timed("environment", lambda: venv.create(folder / "venv", with_pip=not uv))
    wanted = [wheel, *(("nbclient", "ipykernel") if notebook else ()), *requirements]
    installer = [ROOT / ".venv/bin/uv", "pip", "install", "-q", "--python", python]
    if not uv:
        installer = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    parts.timed("install", lambda: call(*installer, *wanted))
    away = folder / "away"
    away.mkdir()
    if notebook is None:
        files, blocks = project()
        for name, text in files.items():
            (away / name).write_text(text, encoding="utf-8")
        for block in blocks:
            print(parts.timed(commands_of(block), partial(call, "bash", "-euc", block, cwd=away)))
        return parts, ""
    parts.timed("import of all methods", lambda: call(python, "-c", TRIED, ROOT))
    shutil.copy(notebook, away)
    run = [python.with_name("jupyter-execute"), "--inplace", "--timeout=1800", notebook.name]
    parts.timed("notebook", lambda: call(*run, cwd=away))
    return parts, (away / notebook.name).read_text(encoding="utf-8")


def project() -> tuple[dict[str, str], list[str]]:
    """Return the files of the page on a project of one's own, and the commands that make a federation of them."""
    before, _, after = PROJECT.read_text(encoding="utf-8").partition(SECTION)
    files = {name: text for name, text in BLOCK.findall(before) if name}
    return files, [block for _, block in BLOCK.findall(after.partition("\n## ")[0])]


def commands_of(block: str) -> str:
    """Return the commands of a block, for a table."""
    return ", ".join(re.findall(r"^(?:fedloom|python) \S+", block, re.MULTILINE))


def lines_written(blocks: Sequence[str]) -> int:
    """Return the number of lines of files, and of settings, that a user writes."""
    text = "".join(blocks)
    files = re.findall(r"<<'END'\n(.*?)^END$", text, re.DOTALL | re.MULTILINE)
    return "".join(files).count("\n") + len(set(re.findall(r"--set (?:'[^']*'|\S+)", text)))


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
    parser.add_argument("--project", action="store_true", help="follow the page on a project of your own instead")
    parser.add_argument("--out", type=Path, help="write the notebook with its outputs to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    about = machine()
    print(describe(about), flush=True)
    with tempfile.TemporaryDirectory(prefix="fedloom-first-use-") as folder:
        chosen = None if options.project else options.notebook
        parts, notebook = first_use(Path(folder), chosen, options.requirements, uv=options.uv)
    if options.out is not None:
        options.out.write_text(notebook, encoding="utf-8")
    cells = json.loads(notebook)["cells"] if notebook else ()
    for output in (output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]):
        print("".join(output.get("text", output.get("data", {}).get("text/plain", ""))).rstrip())
    if options.project:
        print(f"lines written: {lines_written(project()[1])}")
    whole = [sum(taken[i] for taken in parts.taken.values()) for i in range(2)]
    rows = [(name, *(f"{s:.1f}" for s in taken)) for name, taken in [*parts.taken.items(), ("all", whole)]]
    print(table(("part", "wall, s", "CPU, s"), rows))
    write_json(options.json, about, parts.taken)


if __name__ == "__main__":
    main()
