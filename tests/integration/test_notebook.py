"""A tutorial in a notebook, in an environment with only a wheel: the output of its cells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_a_notebook_shows_each_run_in_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / ".venv" / "bin" / "uv").exists():
        pytest.skip("there is no uv, which installs in seconds")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    out = tmp_path / "out.ipynb"
    command = [sys.executable, ROOT / "research" / "benchmarks" / "first_use.py", "--uv", "--out", out]
    notebook = ROOT / "docs" / "tutorials" / "python.ipynb"
    done = subprocess.run([*command, "--notebook", notebook], capture_output=True, text=True, timeout=880)
    if "network" in done.stderr or "Failed to fetch" in done.stderr:
        pytest.skip("packages cannot be had here")
    assert done.returncode == 0, done.stderr
    cells = [cell for cell in json.loads(out.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 10
    (run,) = [cell for cell in cells if "\nrun = fedloom.run(" in "".join(cell["source"])]
    (shown,) = run["outputs"]  # updated after each round and each of five evaluations
    assert set(shown["data"]) == {"text/plain", "text/html"}
    text = "".join(shown["data"]["text/plain"])
    assert "20/20" in text
    assert "after round 20" in text
    assert "after round 15" not in text
    (history,) = [cell for cell in cells if "".join(cell["source"]).startswith("run.history")]
    assert "text/html" in history["outputs"][0]["data"]
