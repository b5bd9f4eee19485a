"""Write tutorials as notebooks, from their pages: each block of Python is a cell, the text between blocks is text.

A block with a title is a file, which its cell writes. Cells keep their outputs as long as their source stays the same.

.venv/bin/python docs/generate_notebooks.py               # the cells as on the pages
.venv/bin/python docs/generate_notebooks.py --run [NAME]  # and run them, to write their outputs anew
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TUTORIALS = Path(__file__).parent / "tutorials"
PAGES = ("images", "python", "your-own-project")
BLOCK = re.compile(r"^```python(?: title=\"([\w.]+)\")?\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
TIMEOUT_S = 1800
"""Seconds that a cell may take."""
VARYING = re.compile(r"\d+\.\d\d(?= s/round)|(?<=ETA )[\d:]+|(?<![\d:])\d:\d\d:\d\d(?![\d:])|(?<= \(time: )[^)]*")
"""Times in the progress of a run, which differ between executions."""


def notebook(page: str, outputs: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the notebook of a page's text, with the outputs of cells by their source."""
    cells: list[dict[str, Any]] = []
    count, title = 0, ""
    for i, part in enumerate(BLOCK.split(page)):
        if i % 3 == 1:
            title = f"%%writefile {part}\n" if part else ""
            continue
        source = f"{title if i % 3 == 2 else ''}{part.strip(chr(10))}"
        lines = source.splitlines(keepends=True)
        if i % 3 == 2:
            count += 1
            kept = outputs.get(source)
            for output in kept or ():
                if "execution_count" in output:
                    output["execution_count"] = count
            cell = {"execution_count": None if kept is None else count, "metadata": {}, "outputs": kept or []}
            cells.append({"cell_type": "code", **cell, "source": lines})
        elif source:
            cells.append({"cell_type": "markdown", "metadata": {}, "source": lines})
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def outputs_of(made: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the outputs of a notebook's cells that have run, by their source, without times."""
    code = [cell for cell in made["cells"] if cell["cell_type"] == "code" and cell["execution_count"]]
    return {"".join(cell["source"]): [_stable(output) for output in _joined(cell["outputs"])] for cell in code}


def run(made: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a notebook's cells in a folder, and return it with their outputs, in which paths are relative to the folder.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    parsed = nbformat.reads(json.dumps(made), as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(parsed, timeout=TIMEOUT_S, resources=resources, record_timing=False).execute()
    done: dict[str, Any] = json.loads(nbformat.writes(parsed).replace(f"{folder.resolve()}{os.sep}", ""))
    return done


def as_text(made: dict[str, Any]) -> str:
    """Return a notebook as the text of its file."""
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return outputs with adjacent pieces of one stream joined, whose number depends on the time."""
    joined: list[dict[str, Any]] = []
    for output in outputs:
        if joined and "name" in output and output["name"] == joined[-1].get("name"):
            joined[-1] = {**output, "text": [*joined[-1]["text"], *output["text"]]}
        else:
            joined.append(output)
    return joined


def _stable(output: dict[str, Any]) -> dict[str, Any]:
    """Return an output without what differs between executions."""

    def stable(text: str | list[str]) -> list[str]:
        return VARYING.sub("…", "".join(text)).splitlines(keepends=True)

    if "text" in output:
        return {**output, "text": stable(output["text"])}
    data = {kind: stable(value) if kind.startswith("text/") else value for kind, value in output["data"].items()}
    return {**output, "data": data, "metadata": {}}


def main() -> None:
    """Write the notebooks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run", nargs="*", choices=PAGES, metavar="NAME", help="run these, or all, to write their outputs"
    )
    again = parser.parse_args().run
    for name in PAGES:
        page, file = ((TUTORIALS / f"{name}.{end}") for end in ("md", "ipynb"))
        made = notebook(page.read_text(encoding="utf-8"), outputs_of(json.loads(file.read_text(encoding="utf-8"))))
        if again is not None and name in (again or PAGES):
            with TemporaryDirectory(prefix="fedloom-notebook-") as folder:
                made = notebook(page.read_text(encoding="utf-8"), outputs_of(run(made, Path(folder))))
        file.write_text(as_text(made), encoding="utf-8")


if __name__ == "__main__":
    main()
