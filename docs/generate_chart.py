"""Write the chart's README.md and the descriptions in its values.schema.json from the comments of its values.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "charts" / "fedloom"
HEAD = """# Values of the fedloom chart

The chart installs a long-running federation: an aggregator, its workers, and monitoring. To install, upgrade or remove
it, see [docs/chart.md](../../docs/chart.md). Allowed values are in `values.schema.json`. `ci/` has an example file of
values for each kind of installation.

This page is generated from `values.yaml` (`make docs`).

| key | default | description |
|---|---|---|
"""


def readme(values: Path = CHART / "values.yaml") -> str:
    """Return the text of the page."""
    text = values.read_text()
    rows = [f"| `{key}` | {default} | {comment} |" for key, default, comment in documented(text)]
    return HEAD + "\n".join(rows) + "\n"


def schema(chart: Path = CHART) -> str:
    """Return the text of the schema, in which every value has its comment as description.

    A value that the schema lacks gets the type of its default; narrower rules are written into the schema by hand.
    """
    tree = json.loads((chart / "values.schema.json").read_text())
    text = (chart / "values.yaml").read_text()
    defaults = yaml.safe_load(text)
    for path, comment in [*sections(text), *((key, comment) for key, _, comment in documented(text))]:
        node, default = tree, defaults
        for name in path.split("."):
            default = default[name]
            parent, last = node["properties"], name
            node = parent.setdefault(name, _typed(default))
        rest = {key: value for key, value in node.items() if key != "description"}
        parent[last] = {"description": comment, **rest}
    return json.dumps(tree, indent=2) + "\n"


def _typed(default: Any) -> dict[str, Any]:
    """Return the rule of a value that has only a default."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    rule: dict[str, Any] = {"type": names[type(default)]}
    return {**rule, "additionalProperties": False, "properties": {}} if default and rule["type"] == "object" else rule


def sections(text: str) -> list[tuple[str, str]]:
    """Return the key and the comment of every mapping of documented values, in order.

    Raises
    ------
    ValueError
        If a mapping has no comment.
    """
    lines = text.splitlines()
    keys = [key for key, _, _ in documented(text)]
    found: list[tuple[str, str]] = []

    def walk(node: yaml.Node, path: tuple[str, ...]) -> None:
        assert isinstance(node, yaml.MappingNode)
        for key, below in node.value:
            name = ".".join((*path, key.value))
            if name in keys:
                continue
            before = lines[key.start_mark.line - 1].strip()
            if not before.startswith("# "):
                raise ValueError(f"{name}: add a comment before it")
            found.append((name, before.removeprefix("# ")))
            walk(below, (*path, key.value))

    walk(yaml.compose(text), ())
    return found


def documented(text: str) -> list[tuple[str, str, str]]:
    """Return the key, the default as JSON, and the comment of every documented value, in order.

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
                raise ValueError(f"{'.'.join(name)}: add a `# --` comment before it")

    walk(yaml.compose(text), (), yaml.safe_load(text))
    return found


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme())
    (CHART / "values.schema.json").write_text(schema())
