"""The tutorial on your own project: its notebook, and then its commands, work as the page says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ports import free_port
from test_tutorial import Shell, blocks_of
from tutorial_notebooks import differences, executed, printed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive  # a minute; the other tutorials are in the first tier
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    outputs = executed("your-own-project", tmp_path)
    assert differences("your-own-project", outputs) == []
    text = printed(outputs)
    assert "True" in text.splitlines()  # worker processes give the same numbers
    # One model does not fit cameras with different views; a model for each does.
    rows = {
        name: tuple(map(float, seen)) for name, *seen in re.findall(r"(\w+) +(0\.\d+) +(0\.\d+)$", text, re.MULTILINE)
    }
    assert rows["FedAvg"][0] + 0.1 < rows["FedBN"][0]
    assert float(re.findall(r"newcomer: (\d+)%", text)[0]) > 40
    shared, own = (float(error) for error in re.findall(r"RMSE ([\d.]+)", text))
    assert own < shared / 2
    blocks = blocks_of("your-own-project.md")
    assert len(blocks) >= 5
    ports = {":7733": f":{free_port()}", ":7734": f":{free_port()}"}
    with contextlib.chdir(tmp_path), contextlib.ExitStack() as processes:
        shell = Shell(tmp_path, processes)
        for block in blocks:
            for port, free in ports.items():
                block = block.replace(port, free)
            shell.run(block)
    photos = torch.from_numpy(np.load(tmp_path / "site-3.npz")["x"])
    probabilities = torch.export.load(tmp_path / "site-3.pt2").module()(photos)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(130))
