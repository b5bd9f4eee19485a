"""FedLoom from its wheel, in an empty environment, in folders outside the clone (docs/install.md)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port
from test_templates import MODULES, NAMES, OFFLINE, check_comparison, check_module, follow
from vowel_data import vowel_root

import fedloom

ROOT = Path(__file__).parents[2]
UV = ROOT / ".venv" / "bin" / "uv"
CONSTRAINTS = ROOT / "images" / "constraints.txt"
Command = Callable[..., str]
WAIT_S = 1500.0
"""Generous: programs of a new environment compile torch's modules first, and the machine may be busy."""
KEPT = {"PYTHONDONTWRITEBYTECODE": ""}
"""Environment in which compiled modules are kept for the next program."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(3 * WAIT_S),
    pytest.mark.group("wheel"),
    pytest.mark.skipif(not UV.exists(), reason="there is no uv, which installs in seconds"),
]


def uv(*words: object) -> None:
    """Run uv; skip if the packages cannot be had."""
    done = subprocess.run([str(word) for word in (UV, *words)], capture_output=True, text=True, timeout=1200)
    if done.returncode and "Failed to fetch" in done.stderr:
        pytest.skip("packages cannot be had here")
    assert done.returncode == 0, done.stderr


def install(programs: Path, *what: object) -> None:
    uv("pip", "install", "--python", programs / "python", "--constraints", CONSTRAINTS, *what)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--wheel", "--out-dir", folder, "--build-constraints", CONSTRAINTS, ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment that has the wheel, its dependencies, and no extra."""
    folder = tmp_path_factory.mktemp("installed")
    uv("venv", folder)
    install(folder / "bin", wheel)
    return folder / "bin"


@pytest.fixture
def run(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs a program of the environment in an empty folder, and returns its output."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    environment = {
        **os.environ,
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "FEDLOOM_DATA": str(vowel_root(tmp_path / "data")),
        "OMP_NUM_THREADS": "1",
        "FEDLOOM_REPORT": "1",
        **KEPT,
    }

    def run(*words: object) -> str:
        command = [str(programs / str(words[0])), *map(str, words[1:])]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_the_environment_has_only_the_wheel(run: Command, programs: Path) -> None:
    where = run("python", "-c", "import fedloom; print(fedloom.__file__)").strip()
    assert Path(where).is_relative_to(programs.parent)
    assert fedloom.__version__ in run("fedloom", "--version")
    subjects = {each["subject"]: each["state"] for each in json.loads(run("fedloom", "doctor", "--json"))}
    assert (subjects["fedloom"], subjects["memory"]) == ("ok", "ok")
    assert len(json.loads(run("fedloom", "methods", "--json"))) > 30
    assert json.loads(run("fedloom", "schema"))["title"] == "Experiment"


def test_a_template_is_checked_and_run_with_workers(run: Command, tmp_path: Path) -> None:
    assert "fedloom[compare]" in run("fedloom", "new", "comparison", "mine")
    experiment, short = tmp_path / "mine" / "experiment.yaml", ("--set", "federation.rounds=2")
    assert "valid" in run("fedloom", "check", experiment, *short)
    printed = run("fedloom", "run", experiment, *short, "--set", "runtime.workers=2", "--out", "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2
    assert "fedloom[report]" in printed, "no report, and what it needs"


def test_members_join_an_aggregator(run: Command, programs: Path, tmp_path: Path) -> None:
    run("fedloom", "new", "hospitals", "mine")
    port = free_port()
    follow(tmp_path / "mine", programs, **KEPT, LISTEN=f"127.0.0.1:{port}", AGGREGATOR=f"localhost:{port}")
    assert json.loads((tmp_path / "mine" / "run" / "summary.json").read_text())["seen"]["clients"] == 2


def test_every_template_runs_with_the_extras_that_it_names(
    run: Command, wheel: Path, programs: Path, tmp_path: Path
) -> None:
    listed = {each["name"]: each["extras"] for each in json.loads(run("fedloom", "new", "--json"))}
    assert list(listed) == NAMES
    extras = sorted({extra for names in listed.values() for extra in names})
    install(programs, f"{wheel}[{','.join(extras)}]", "pytest", "pip", "hatchling", "editables")
    for name in ("comparison", "module-table", "module-images", "method"):
        assert "pip install" not in run("fedloom", "new", name, name)
        more = {**KEPT, "FEDLOOM_REPORT": "1", **(OFFLINE if name == "method" else {})}
        printed = follow(tmp_path / name, programs, **more)
        if name == "comparison":
            check_comparison(tmp_path / name, printed)
            continue
        assert list((tmp_path / name).glob("runs/*/report.html")), name
        if name in MODULES:
            check_module(name, tmp_path / name)
