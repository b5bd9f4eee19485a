"""Runs whose training is private: the ε that they claim, what ends them, and what tells of it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.privacy.accounting import epsilon_of, sampled
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Journal

VOWEL = Path(__file__).parents[1] / "fixtures" / "Vowel.rda"
PRIVACY: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 3.0, "delta": 1e-3}
DRAWN = sampled("poisson", 12, 3, 3.0)  # 12 of 15 speakers train, 3 a round


def experiment(folder: Path, **federation: Any) -> dict[str, Any]:
    """Clients of the fixture of vowels; ``federation`` replaces keys of the section."""
    data = folder / "data" / "datasets" / "vowel"
    data.mkdir(parents=True, exist_ok=True)
    shutil.copy(VOWEL, data)
    return {
        "name": "vowels",
        "data": {
            "root": str(folder / "data"),
            "dataset": "vowel",
            "partition": {"scheme": "natural"},
            "held_out_fraction": 0.2,
        },
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": "fedavg", "weighting": "uniform", "local": {"steps": 2, "batch_size": 8, "lr": 0.1}},
        "federation": {"rounds": 6, "clients_per_round": 3, "privacy": PRIVACY, **federation},
        "evaluation": {"every": 4},
        "runtime": {"workers": 0},
    }


def trained(folder: Path, out: str = "run", *, resume: bool = False, replay: Path | None = None, **keys: Any) -> Path:
    options = {"report": False, "progress": False, "resume": resume, "replay": replay}
    return Path(fedloom.run(experiment(folder, **keys), out=folder / out, **options).folder)


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def metrics_of(run: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# --- privacy of examples ----------------------------------------------------------------------------------------------

OF_EXAMPLES: dict[str, Any] = {"of": "examples", "clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-3}
STEP = sampled("poisson", 27, 8, 2.0)  # each client has 27 examples


def visits(run: Path) -> Counter[str]:
    """How often each client trained, as the journal says."""
    held = [held.clients for attempt in Journal.read(RunFolder(run)).attempts for held in attempt.conversations]
    return Counter(client for clients in held for client in clients)


def test_steps_of_the_client_that_trained_most_are_claimed_toward_everyone(tmp_path: Path) -> None:
    run = trained(tmp_path, privacy=OF_EXAMPLES, rounds=12)
    told = summary_of(run)["training_privacy"]
    most = max(visits(run).values())
    assert (told["unit"], told["sums"], told["sampling"]) == ("examples", 2 * most, ["poisson"])
    assert told["epsilon"] == pytest.approx(epsilon_of({STEP: 2 * most}, 1e-3))
    assert told["to_aggregator"] == told["to_readers"]
    assert "Update.loss" not in told["does_not_cover"]  # it is not sent


def test_noise_of_examples_is_found_for_an_epsilon_that_few_visits_exceed(tmp_path: Path) -> None:
    asked = {**OF_EXAMPLES, "noise_multiplier": None, "epsilon": 3.0}
    run = trained(tmp_path, privacy=asked, rounds=12)
    assert 1.5 < summary_of(run)["training_privacy"]["epsilon"] <= 3.0
    planned = fedloom.privacy_cost(experiment(tmp_path, privacy=asked, rounds=12))
    assert planned.noise_multiplier == summary_of(run)["training_privacy"]["noise_multiplier"]
    assert (planned.examples, planned.batch, planned.unit) == (27, 8, "examples")
    assert planned.by_rounds[-1].to_readers == planned.by_rounds[-1].to_aggregator <= 3.0
    everywhere = fedloom.privacy_cost(experiment(tmp_path, privacy=asked, rounds=12), examples=500)
    assert everywhere.noise_multiplier < planned.noise_multiplier


def test_budget_of_examples_ends_before_a_client_exceeds_it(tmp_path: Path) -> None:
    limit = epsilon_of({STEP: 4}, 1e-3)  # two visits of two steps
    run = trained(tmp_path, privacy={**OF_EXAMPLES, "budget": limit}, rounds=40)
    summary = summary_of(run)
    assert summary["ended_by"] == "budget"
    assert summary["training_privacy"]["epsilon"] == pytest.approx(limit)
    assert summary["training_privacy"]["sums"] == 4
