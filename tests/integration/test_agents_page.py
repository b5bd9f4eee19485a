"""AGENTS.md, followed literally: its files make a package, and its commands train with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks() -> list[tuple[str, str]]:
    """Return the language and text of the page's code blocks."""
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    return [(language, textwrap.dedent(text)) for _, language, text in BLOCK.findall(page)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the page's files, the package as installed, and readings of six sites."""
    folder = tmp_path_factory.mktemp("agents")
    for _, text in blocks():
        if (named := re.match(r"# ([\w/]+\.(?:py|toml|yaml))\n", text)) is not None:
            file = folder / named[1]
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
    assert {path.name for path in (folder / "my_package").iterdir()} == {
        "fedmedian.py", "focal.py", "nets.py", "tiny.py", "readings.py",
    }  # fmt: skip
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    about = folder / "my_package-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in groups]
    (about / "entry_points.txt").write_text("\n".join(lines))
    random = np.random.default_rng(0)
    owner = np.repeat(np.arange(8), 60)
    x = random.normal(size=(480, 3)) + owner[:, None] % 3
    (folder / "brought").mkdir()
    np.savez(folder / "brought" / "readings.npz", x=x, y=(x[:, 0] > owner % 3).astype(int), owner=owner)
    return folder


def run(place: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(place), "FEDLOOM_DATA": str(place / "data"), "OMP_NUM_THREADS": "1"}
    done = forked.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_recipes_train(place: Path) -> None:
    fedloom = (sys.executable, "-m", "fedloom")
    run(place, *fedloom, "data", "fetch", "readings", "--from", "brought")
    commands = [
        shlex.split(line)[1:]
        for language, text in blocks()
        if language == "sh"
        for line in text.splitlines()
        if line.startswith("fedloom run recipes.yaml")
    ]
    assert len(commands) == 2
    for command in commands:
        run(place, *fedloom, *command)
    for out, model in (("named", "tiny"), ("factory", "module")):
        summary = json.loads((place / out / "summary.json").read_text())
        reported = (summary["algorithm"], summary["dataset"], summary["task"], summary["model"].split(",")[0])
        assert reported == ("fedmedian", "readings", "focal", model)
        assert (summary["seen"]["clients"], summary["unseen"]["clients"]) == (6, 2)
        assert summary["seen"]["accuracy_mean"] > 0.75


@pytest.mark.slow
def test_the_focal_loss_and_the_median_match_their_papers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    from my_package.fedmedian import FEDMEDIAN  # type: ignore[import-not-found]
    from my_package.focal import Focal  # type: ignore[import-not-found]

    outputs, y = torch.randn(7, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    p = F.softmax(outputs, 1)[torch.arange(7), y]
    torch.testing.assert_close(Focal(gamma=3).loss(outputs, y), -((1 - p) ** 3) * p.log())
    torch.testing.assert_close(Focal(gamma=0).loss(outputs, y), F.cross_entropy(outputs, y, reduction="none"))

    class Updates:
        delta_theta: Tensor = torch.tensor([[1.0, 5], [2, 4], [9, 9], [3, 3]])
        present: Tensor = torch.tensor([True, True, False, True])

    settings: Any = FEDMEDIAN.settings(server_lr=0.5)
    assert FEDMEDIAN.aggregate(torch.zeros(2), Updates(), settings).tolist() == [1.0, 2.0]


@pytest.mark.exhaustive
def test_the_method_passes_the_conformance_kit(place: Path) -> None:
    found = re.search(r"`pytest (tests/conformance [^`]*)`", (ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    assert found is not None
    pytest_alone = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command = [sys.executable, *pytest_alone, *found[1].split()]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = forked.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 20


def test_packages_files_and_targets_named_on_the_page_exist() -> None:
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    rooms = {path.name for path in (ROOT / "src" / "fedloom").iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(re.findall(r"`(\w+)/`", page))
    for named in re.findall(r"`((?:tests|src|docs)/[\w/.]+\w)`", page):
        assert (ROOT / named).exists(), named
    for link in re.findall(r"\]\(([^)#\s]+)", page):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", page, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
