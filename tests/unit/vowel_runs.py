"""Runs on the fixture of vowels, or on means: small ones, put together as `fedloom run` does."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from federations import Silent

from fedloom import experiment as experiments
from fedloom.federation.loop import Loop
from fedloom.federation.loop_config import LoopHooks
from fedloom.runner import assemble
from fedloom.runs.folder import RunFolder


def loop(
    folder: Path,
    data: dict[str, Any],
    model: dict[str, Any],
    algorithm: dict[str, Any],
    rounds: int = 1,
    own_steps: Sequence[int] | None = None,
) -> Loop:
    """The loop of a run in ``folder/run``, as ``fedloom run`` puts it together."""
    tree = {
        "name": "small",
        "data": {"root": str(folder / "data"), **data},
        "model": model,
        "algorithm": algorithm,
        "federation": {"rounds": rounds, "clients_per_round": 3},
        "evaluation": {"every": 1, "own_steps": None if own_steps is None else list(own_steps)},
        "runtime": {"workers": 0},
    }
    e = experiments.loads(yaml.safe_dump(tree))
    dataset = assemble.make_partition(e)
    parts, run = assemble.make_parts(e, dataset.manifest), RunFolder(folder / "run")
    run.make(e.resolved_yaml())
    run.write("partition.json", dataset.manifest.to_json())
    return assemble.loop(parts, assemble.in_process(parts, dataset, run), run, LoopHooks(Silent()))


MODEL = {"name": "mlp", "hidden": [4]}


def on_vowels(
    folder: Path,
    algorithm: dict[str, Any],
    rounds: int = 1,
    own_steps: Sequence[int] | None = None,
    model: dict[str, Any] = MODEL,
) -> Loop:
    data = folder / "data" / "datasets" / "vowel"
    data.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).parents[1] / "fixtures" / "Vowel.rda", data)
    vowels = {"dataset": "vowel", "partition": {"scheme": "natural"}, "held_out_fraction": 0.2}
    return loop(folder, vowels, model, algorithm, rounds, own_steps)
