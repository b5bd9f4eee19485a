"""Completion of values by a shell: keys of experiments, runs, and names; it imports no other part of FedLoom.

The keys are stored with the package (``make docs`` writes ``keys.json``), because their schema imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

KEYS = Path(__file__).with_name("keys.json")
"""File of a mapping: dotted key -> [description, values]."""


def experiment_keys() -> dict[str, tuple[str, list[str]]]:
    """Return the description and the values, if they are names, of every key of FedLoom's own experiments."""
    return {key: (about, values) for key, (about, values) in json.loads(KEYS.read_text(encoding="utf-8")).items()}


def complete_overrides(incomplete: str) -> list[tuple[str, str]]:
    """Return the values of ``--set`` that begin with a text: keys, and after ``=`` names."""
    key, equals, value = incomplete.partition("=")
    if equals:
        about, values = experiment_keys().get(key, ("", []))
        return [(f"{key}={each}", about) for each in values if each.startswith(value)]
    return [(f"{name}=", about) for name, (about, _) in experiment_keys().items() if name.startswith(key)]


def completed_values(key: str) -> Callable[[str], list[str]]:
    """Return a completion of the names that a key of experiments allows."""
    return lambda incomplete: [name for name in experiment_keys()[key][1] if name.startswith(incomplete)]


def complete_runs(incomplete: str) -> list[str]:
    """Return the folders of runs, and folders that may hold some, that begin with a text; first those in ``runs``."""
    above, _, name = incomplete.rpartition("/")
    folders = [Path(above or ("/" if incomplete.startswith("/") else "."))]
    folders += [Path("runs")] if not incomplete else []
    found = []
    for folder in folders:
        for path in sorted(folder.glob(f"{name}*/")):
            is_run = (path / "experiment.yaml").is_file()
            if is_run or (incomplete and not path.name.startswith(".")):
                found.append(str(path) if is_run else f"{path}/")
    return found
