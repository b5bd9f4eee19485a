"""`fedloom reproduce` as a user runs it: a part of a real page, stopped, continued and damaged; without a clone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from facts import tells
from run_processes import ENVIRONMENT, FEDLOOM, ended, fedloom, started, until
from vowel_data import vowel_root

ROOT = Path(__file__).parents[2]
TRAINING_S = 800.0
"""Bound of two short trainings on a machine that is busy with other things; idle, they take 15 seconds."""


def reproduced(*words: object, environment: dict[str, str], code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command that trains to its end."""
    given = {**ENVIRONMENT, **environment}
    done = subprocess.run([*FEDLOOM, *map(str, words)], env=given, capture_output=True, text=True, timeout=TRAINING_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
@pytest.mark.timeout(2 * TRAINING_S)
def test_a_stopped_part_continues_and_agrees_and_a_damaged_run_is_told(tmp_path: Path) -> None:
    environment = {"FEDLOOM_DATA": str(vowel_root(tmp_path / "data"))}
    words = ("reproduce", "vowel/1", "--seeds", "2", "--runs", tmp_path / "runs")
    first = tmp_path / "runs/vowel/fedavg/seed=2"
    with started(*words, environment=environment) as process:
        until(lambda: (first / "metrics.jsonl").exists(), "the first run begins")
        process.send_signal(signal.SIGTERM)
        ended(process, 130)
    assert not (first / "summary.json").exists()

    output = reproduced(*words, environment=environment).stdout
    assert tells(output, "fedloom run experiments/vowel.yaml", "--resume", "vowel/methods", "fedavg/seed=2", "6 of 6")
    lines = [json.loads(line) for line in (tmp_path / "runs/vowel/made.jsonl").read_text().splitlines()]
    assert [(line["out"], line["event"]) for line in lines] == [
        ("fedavg", "begin"), ("fedavg", "begin"), ("fedavg", "end"), ("local", "begin"), ("local", "end"),
    ]  # fmt: skip

    facts = json.loads(reproduced(*words, "--json", environment=environment).stdout)
    assert facts["part"] == "vowel/methods"
    assert len(facts["figures"]) == 6
    assert all(each["agrees"] for each in facts["figures"])

    (first / "metrics.jsonl").write_text("{broken\n")
    assert "metrics.jsonl" in reproduced(*words, environment=environment, code=3).stderr


def test_an_unknown_page_is_refused() -> None:
    assert tells(fedloom("reproduce", "vowle", code=2), "vowle", "vowel")


def test_a_package_without_a_clone_says_what_it_needs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src/fedloom", tmp_path / "site/fedloom", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    words = [
        sys.executable,
        "-P",
        "-c",
        "import sys; sys.argv = ['fedloom', 'reproduce']; from fedloom.cli.main import main; main()",
    ]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=TRAINING_S)
    assert done.returncode == 2, done.stderr
    assert tells(done.stderr, "needs a clone")
