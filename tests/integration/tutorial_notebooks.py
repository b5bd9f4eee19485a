"""Executions of the tutorials' notebooks, compared with the outputs that the repository keeps."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate_notebooks.py"))
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+|(?=%))")
"""A number with decimals, or a percentage; other numbers count something and are compared as words."""
TOLERANCE = 0.15
"""Largest difference of two shares on different processors; of other numbers, relative."""
FROM_NUMBERS = (".head()", ".argmax())]")
"""Ends of expressions whose words follow from numbers: the first of a ranking, the class of one image."""
OF_ONE_CLIENT = ('of its test images")',)
"""Ends of expressions that print a single client's accuracy: 48 to 68 % of its 50 images, by processor."""

Outputs = dict[str, list[dict[str, Any]]]


def kept(name: str) -> dict[str, Any]:
    """Return a notebook of the repository."""
    found: dict[str, Any] = json.loads((ROOT / "docs" / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def executed(name: str, folder: Path) -> Outputs:
    """Run a notebook of the repository in a folder; return the outputs of its cells by source."""
    outputs: Outputs = GENERATOR["outputs_of"](GENERATOR["run"](kept(name), folder))
    return outputs


def differences(name: str, outputs: Outputs) -> list[str]:
    """Return how outputs differ from those that the repository keeps: kinds, words, numbers beyond the tolerance."""
    before: Outputs = GENERATOR["outputs_of"](kept(name))
    assert list(before) == list(outputs)
    return [
        f"{source}: {why}" for source in before for why in _cell_differences(source, before[source], outputs[source])
    ]


def printed(outputs: Outputs) -> str:
    """Return what the cells have printed."""
    return "".join(line for cell in outputs.values() for output in cell for line in output.get("text", ()))


def _cell_differences(source: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    if (kinds := [list(map(_kind, cell)) for cell in (before, after)])[0] != kinds[1]:
        return [f"kinds {kinds[0]} became {kinds[1]}"]
    if any(end in source for end in FROM_NUMBERS):
        return []
    pairs = [(_text(one), _text(other)) for one, other in zip(before, after, strict=True)]
    changed = [pair for pair in pairs if len({" ".join(NUMBER.sub("#", text).split()) for text in pair}) > 1]
    found = [f"{one!r} became {other!r}" for one, other in changed]
    if any(end in source for end in OF_ONE_CLIENT):
        return found
    for one, other in (map(NUMBER.findall, pair) for pair in pairs if pair not in changed):
        found += [f"{a} became {b}" for a, b in zip(one, other, strict=True) if _are_far(a, b)]
    return found


def _kind(output: dict[str, Any]) -> tuple[str, ...]:
    return output["output_type"], *output.get("data", {}), output.get("name", "")


def _text(output: dict[str, Any]) -> str:
    return "".join(output.get("text") or output["data"]["text/plain"])


def _are_far(before: str, after: str) -> bool:
    a, b = float(before), float(after)
    one = 1 if len(before.partition(".")[2]) > 1 else 100  # percentages have one decimal or none
    return abs(a - b) > TOLERANCE * max(one, abs(a))
