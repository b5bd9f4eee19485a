"""Small runs on the vowel fixture, or on means, built as by `fedloom run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from federations import Silent
from torch import nn
from vowel_data import SPEAKERS, vowel_root

from fedloom import experiment as experiments
from fedloom.engine import assemble, loops, run_data
from fedloom.federation.evaluator import LoopHooks
from fedloom.federation.loop import Loop
from fedloom.runs.folder import RunFolder


def loop(
    folder: Path,
    data: dict[str, Any],
    model: dict[str, Any],
    algorithm: dict[str, Any],
    rounds: int = 1,
    own_steps: Sequence[int] | None = None,
) -> Loop:
    """Return the loop of a run in ``folder/run``, built as by ``fedloom run``."""
    tree = {
        "name": "small",
        "data": {"root": str(folder / "data"), **data},
        "model": model,
        "algorithm": algorithm,
        "federation": {"rounds": rounds, "clients_per_round": 3},
        "evaluation": {"every": 1, "own_steps": None if own_steps is None else list(own_steps)},
        "runtime": {"workers": 0},
    }
    e = experiments.parse_experiment(yaml.safe_dump(tree))
    dataset = run_data.make_partition(e)
    parts, run = assemble.make_parts(e, dataset.manifest), RunFolder(folder / "run")
    run.make(e.resolved_yaml())
    run.write("partition.json", dataset.manifest.to_json())
    return loops.loop(parts, assemble.in_process(parts, dataset, run), run, LoopHooks(Silent()))


def normalized() -> nn.Module:
    """Return a network with a normalization layer, for methods that need one."""
    return nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 11))


def on_vowels(folder: Path, algorithm: dict[str, Any], rounds: int = 1, own_steps: Sequence[int] | None = None) -> Loop:
    vowel_root(folder / "data")
    plain, norms = {"name": "mlp", "hidden": [4]}, {"name": "module", "factory": "vowel_runs:normalized"}
    return loop(folder, SPEAKERS, norms if algorithm["name"] == "fedbn" else plain, algorithm, rounds, own_steps)
