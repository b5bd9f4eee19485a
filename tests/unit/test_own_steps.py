"""What a new client's own steps are worth, as experiments/own_steps.py measures it."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import own_steps
import pytest
from vowel_runs import on_vowels

from fedloom.runner.trained import evaluate

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "local": {"steps": 2, "lr": 0.1}},
    "pefll": {
        "name": "pefll",
        "local": {"steps": 2, "lr": 0.1},
        "embedding": {"network": "mlp"},
        "hypernetwork": {"size": "S"},
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_steps_after_training_are_those_that_a_run_would_make(tmp_path: Path, method: str) -> None:
    run = on_vowels(tmp_path / "run", METHODS[method])
    run.run()
    tuned = on_vowels(tmp_path / "tuned", METHODS[method] | {"personalize_steps": 3})
    tuned.run()
    found = {line.steps: line for t in (0, 3) for line in own_steps.measured(run.folder.path, t, [])}
    for t, of in ((0, run), (3, tuned)):
        expected = evaluate(of.folder.path).statistics["unseen"]
        assert (found[t].mean, found[t].clients) == (expected["accuracy_mean"], expected["clients"])
    assert found[0].mean != found[3].mean


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_vowels(tmp_path / "run", {"name": "local", "local": {"steps": 2}}, rounds=0)
    run.run()
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["own_steps", str(run.folder.path), "--steps", "0,1,2", "--out", str(out)])
    own_steps.main()
    rows = list(csv.DictReader((out / "own-steps.csv").read_text().splitlines()))
    assert [(row["method"], row["steps"]) for row in rows] == [("local", "1"), ("local", "2")]
    assert "svg" in (out / "own-steps.svg").read_text()
    other = on_vowels(tmp_path / "other", {"name": "fedper"})
    other.run()
    with pytest.raises(SystemExit, match="allowed: local, fedavg, pefll"):
        own_steps.measured(other.folder.path, 1, [])
