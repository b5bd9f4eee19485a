"""Tutorials as notebooks: their cells give the outputs that the repository keeps, also with an installed wheel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tutorial_notebooks import GENERATOR, ROOT, Outputs, differences, executed, printed


def progress_of_the_run(outputs: Outputs, cell: str) -> str:
    """Return the text of a run's single output, which is updated after each round and each evaluation."""
    (run,) = (found for source, found in outputs.items() if cell in source)
    (shown,) = run
    assert set(shown["data"]) == {"text/plain", "text/html"}
    return "".join(shown["data"]["text/plain"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_on_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    outputs = executed("python", tmp_path)
    assert differences("python", outputs) == []
    assert (tmp_path / "curve.png").exists()
    assert (tmp_path / "clinic-1.safetensors").exists()
    text = progress_of_the_run(outputs, "\nrun = fedloom.run(")
    assert "20/20" in text
    assert "after round 15" not in text
    # A shared model, or a few local steps, helps where every client differs.
    own, shared = (float(found) for found in re.search(r"seen ([\d.]+).* global ([\d.]+)", text).groups())  # type: ignore[union-attr]
    assert own > shared
    assert all(int(share) > 60 for share in re.findall(r"(\d+)% right", printed(outputs)))


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.timeout(1800)
@pytest.mark.exhaustive
@pytest.mark.usefixtures("fashion_mnist_root")
def test_the_notebook_on_images_with_an_installed_wheel(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / "bin" / "uv").exists():
        pytest.skip("there is no uv, which installs in seconds")
    out = tmp_path / "out.ipynb"
    command = [sys.executable, ROOT / "research" / "benchmarks" / "first_use.py", "--uv", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1780)
    if "network" in done.stderr or "Failed to fetch" in done.stderr:
        pytest.skip("packages cannot be had here")
    assert done.returncode == 0, done.stderr
    outputs = GENERATOR["outputs_of"](json.loads(out.read_text(encoding="utf-8")))
    assert differences("images", outputs) == []
    for cell in ("\npefll = fedloom.run(", "\nfedavg = fedloom.run("):
        text = progress_of_the_run(outputs, cell)
        assert "100/100" in text
        assert "after round 100" in text
        assert "after round 75" not in text
