"""Figures that `make run` prints beside its own."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import quickstart_expected
from facts import tells

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "quickstart.csv"


def store(folder: Path, algorithm: str, seed: int, accuracies: dict[int, float]) -> None:
    """Write the part of a run's summary that is compared."""
    lines = [
        {"steps": k, "unseen": {"accuracy_mean": value / 100, "masked": {"accuracy_mean": 1.0}}}
        for k, value in accuracies.items()
    ]
    summary: dict[str, Any] = {"algorithm": algorithm, "seed": seed, "own_steps": lines}
    if algorithm == "local":
        summary |= {"local": {"new_client": {"personal": {"client_steps": 100}}}, "unseen": lines[0]["unseen"]}
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))


def printed(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of the table, by method and steps."""
    monkeypatch.setattr(sys, "argv", ["quickstart_expected.py", str(runs)])
    quickstart_expected.main()
    return capsys.readouterr().out.splitlines()


def test_a_run_is_shown_beside_what_is_expected_of_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path / "pefll", "pefll", 1, {0: 85.5, 20: 60.0})
    store(tmp_path / "local/seed=2", "local", 2, {100: 90.75})
    lines = printed(tmp_path, monkeypatch, capsys)
    shown = {tuple(line.split()[:2]): line for line in lines if line.split()[:1] in (["1"], ["2"])}
    assert len([line for line in lines if line.startswith("   1")]) == 2
    assert any(tells(line, "PeFLL", "0", "86.7", "85.5") and "outside" not in line for line in lines)
    assert any(tells(line, "PeFLL", "20", "60.0", "outside") for line in lines)
    assert tells(shown["2", "Local,"], "100", "90.7", "90.8")
    store(tmp_path / "other/pefll", "pefll", 9, {0: 85.5})
    assert tells(printed(tmp_path / "other", monkeypatch, capsys)[0], "No figures", "quickstart-expected.csv")


def test_what_is_expected_is_what_the_page_measured() -> None:
    with RESULTS.open(encoding="utf-8", newline="") as file:
        pages = {row["run"]: row for row in csv.DictReader(file)}
    with quickstart_expected.EXPECTED.open(encoding="utf-8", newline="") as file:
        expected = list(csv.DictReader(file))
    assert {row["seed"] for row in expected} == set("1234")
    for row in expected:
        if row["seed"] != "1":
            measured = pages[f"native/{row['method']}/seed={row['seed']}"][f"after_{row['steps']}"]
            assert float(row["accuracy"]) == float(measured)
