"""Every cell of the tutorial for notebooks, in order, works as the page says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "python.md"


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    cells = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(cells) >= 9
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        for cell in cells:
            exec(compile(cell, str(PAGE), "exec"), names)
    output = capsys.readouterr().out
    assert "9 clinics train, 3 appear afterwards" in output
    assert "did you mean clients_per_round?" in output
    assert "20 -> 25 rounds" in output
    assert (tmp_path / "curve.png").exists()
    assert (tmp_path / "clinic-1.safetensors").exists()
    assert len(names["comparison"].table) >= 3
    # A shared model, or a few local steps, helps where every client differs.
    assert names["run"].summary["seen"]["accuracy_mean"] > names["run"].summary["global"]["seen"]["accuracy_mean"]
    for reported in ("clinic 1: ", "a new clinic: "):
        assert float(output.partition(reported)[2].split()[0]) > 0.6
