"""Benchmarks that use FedLoom's classes, in their smallest sizes, so that they keep working."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run

BENCHMARKS = Path(__file__).parents[2] / "research" / "benchmarks"


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("aggregator_overhead.py", ("--smallest", "--workers", "1", "--seconds", "0"), "ratios"),
        pytest.param(
            "registered_clients.py",
            ("--clients", "24", "--seconds", "0"),
            "models_per_s_20",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "secure_rounds.py",
            ("cohort", "--clients", "4", "--parameters", "1000"),
            "cpu_s",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("serving.py", ("--seconds", "0.5", "--no-training"), "serve", marks=pytest.mark.exhaustive),
        pytest.param("start.py", ("--repetitions", "1", "--runs", "2"), "sweeps", marks=pytest.mark.exhaustive),
        pytest.param(
            "serving_adapters.py", ("--seconds", "0.5", "--smallest"), "one layer", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_each_benchmark_runs_at_its_smallest_size(
    tmp_path: Path, name: str, options: tuple[str, ...], key: str
) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / name), *options, "--json", str(file)]
    done = run(command, env={**os.environ, "FEDLOOM_REPORT": "0"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    figures: Any = json.loads(file.read_text())["figures"]
    (found,) = figures if isinstance(figures, list) else figures.values()
    assert found[key]
