"""Write ``charts/fedloom/README.md`` from the values of the chart and the comments in front of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "charts" / "fedloom"
HEAD = """# The chart fedloom

A federation that lives for months: its aggregator, its workers, and what watches it. How to install,
upgrade and remove it: [docs/chart.md](../../docs/chart.md). What is allowed: `values.schema.json`. A file of values for
each kind of installation: `ci/`.

This page is made from `values.yaml` (`make docs`).

| key | default | what |
|---|---|---|
"""


def readme(values: Path = CHART / "values.yaml") -> str:
    """Return the page."""
    text = values.read_text()
    rows = [f"| `{key}` | {default} | {comment} |" for key, default, comment in documented(text)]
    return HEAD + "\n".join(rows) + "\n"


def documented(text: str) -> list[tuple[str, str, str]]:
    """Return key, default as JSON, and comment of every value that has one, in order.

    Raises
    ------
    ValueError
        If a value has no comment.
    """
    lines = text.splitlines()
    found: list[tuple[str, str, str]] = []

    def walk(node: yaml.Node, path: tuple[str, ...], value: Any) -> None:
        assert isinstance(node, yaml.MappingNode)
        for key, below in node.value:
            name = (*path, key.value)
            before = lines[key.start_mark.line - 1].strip() if key.start_mark.line else ""
            inside = value[key.value]
            if before.startswith("# --"):
                default = json.dumps(inside).replace("|", "\\|")
                found.append((".".join(name), f"`{default}`", before.removeprefix("# --").strip()))
            elif isinstance(inside, dict) and inside:
                walk(below, name, inside)
            else:
                raise ValueError(f"{'.'.join(name)}: no comment in front of it")

    walk(yaml.compose(text), (), yaml.safe_load(text))
    return found


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme())
