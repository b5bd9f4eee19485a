"""The tutorial on your own project: its file, cells and commands, in order, work as the page says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from test_tutorial import Shell

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "your-own-project.md"
BLOCK = re.compile(r'^```(python|sh)(?: title="([\w.]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.exhaustive  # half a minute; the other tutorials are in the first tier
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", "")  # set by a cell
    monkeypatch.setenv("FEDLOOM_FACTORIES", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 15
    ports = {":7733": f":{free_port()}", ":7734": f":{free_port()}"}
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path), contextlib.ExitStack() as processes:
        shell = Shell(tmp_path, processes)
        for language, title, text in blocks:
            if title:
                (tmp_path / title).write_text(text)
            elif language == "python":
                exec(compile(text, str(PAGE), "exec"), names)
            else:
                for port, free in ports.items():
                    text = text.replace(port, free)
                shell.run(text)
    output = capsys.readouterr().out
    print(output, names["table"][["label", "seen_accuracy", "unseen_accuracy"]])
    fedbn, fedavg = names["fedbn"].summary, names["tuned"].summary
    assert fedbn["seen"] == names["again"].summary["seen"]
    assert "True" in output.splitlines()
    # One model does not fit cameras with different views; a model for each does.
    assert fedavg["global"]["seen"]["accuracy_mean"] + 0.1 < fedbn["seen"]["accuracy_mean"]
    assert fedbn["unseen"]["clients"] == 3
    assert float(re.findall(r"newcomer: (\d+)%", output)[0]) > 40
    shared, own = (float(error) for error in re.findall(r"RMSE (\d+)", output))
    assert own < shared / 2
    photos = names["Photos"](3, count=130)
    probabilities = torch.export.load(tmp_path / "site-3.pt2").module()(photos.images)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(130))
