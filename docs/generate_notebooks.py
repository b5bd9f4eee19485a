"""Writes tutorials as notebooks, from their pages: each block of Python is a cell, what is between them is text.

A block with a title is a file, which its cell writes.

.venv/bin/python docs/generate_notebooks.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parent / "tutorials"
PAGES = ("images", "python", "your-own-project")
BLOCK = re.compile(r"^```python(?: title=\"([\w.]+)\")?\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def notebook(page: str) -> str:
    """Return the notebook of a page's text, without outputs."""
    cells: list[dict[str, Any]] = []
    title: str | None = None
    for i, part in enumerate(BLOCK.split(page)):
        if i % 3 == 1:
            title = part
            continue
        source = part.strip("\n").splitlines(keepends=True)
        if i % 3 == 2:
            source = [*([f"%%writefile {title}\n"] if title else []), *source]
            cells.append(
                {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
            )
        elif source:
            cells.append({"cell_type": "markdown", "metadata": {}, "source": source})
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write them."""
    for name in PAGES:
        page = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
        (TUTORIALS / f"{name}.ipynb").write_text(notebook(page), encoding="utf-8")


if __name__ == "__main__":
    main()
