"""research/benchmarks/gpu.py on a CPU, in tiny sizes: `make cuda` runs it on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.cluster
def test_the_benchmark_runs_on_a_cpu_and_finds_equal_results(tmp_path: Path, fashion_mnist_root: Path) -> None:
    command = [
        sys.executable,
        ROOT / "research" / "benchmarks" / "gpu.py",
        "--device",
        "cpu",
        "--tiny",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr
    agreement = json.loads((tmp_path / "agreement.json").read_text())["figures"]
    limits = {"float64": 1e-10, "float32": 1e-3}
    assert {row["model"] for row in agreement["training"]} == {"lenet", "lstm"}
    for row in agreement["training"]:
        assert row["difference"] < limits[row["dtype"]], row
        assert row["same_bits_twice"]
    for row in agreement["conversations"]:  # eight clients at once, and one by one
        assert row["difference"] < limits["float32"], row
    speed = json.loads((tmp_path / "speed.json").read_text())["figures"]
    assert all(row["steps_per_s"] > 0 for row in speed)
    (table,) = json.loads((tmp_path / "table.json").read_text())["figures"]
    assert table["finished"]
    assert table["round"] == 1
    assert "| lstm" in (tmp_path / "gpu.md").read_text()
