"""Tests that run in several processes (``tests/parallel.py``): pytest itself, on a file of tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parents[1]

FILE = """
import os, signal, warnings
import pytest

def note(name):
    with open("processes.txt", "a") as file:
        file.write(f"{name} {os.getpid()}\\n")

@pytest.fixture(scope="module")
def made():
    yield os.getpid()
    note("undone")

@pytest.mark.group("together")
@pytest.mark.parametrize("i", range(6))
def test_together(i, made):
    assert made == os.getpid()
    note("together")

@pytest.mark.parametrize("i", range(4))
def test_alone(i, tmp_path):
    note("alone")
    tmp_path.joinpath("x").touch()
    print("printed", i)
    warnings.warn(f"warned {i}", stacklevel=1)
    assert i != 2

@pytest.mark.group("fatal")
@pytest.mark.parametrize("i", range(4))
def test_fatal(i):
    if i == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def test_skipped():
    pytest.skip("why")
"""


def run(folder: Path, *options: str, job: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pytest, as a ``job`` as in the background, which ignores the interrupts of a terminal."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    group(name): together\n")
    (folder / "conftest.py").write_text("from parallel import *\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=results.xml", *options]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONDONTWRITEBYTECODE": "1"}
    if job:
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "job", *command]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def outcomes(folder: Path) -> dict[str, str]:
    cases = ElementTree.parse(folder / "results.xml").iter("testcase")
    return {case.attrib["name"]: next((child.tag for child in case), "passed") for case in cases}


def test_every_test_runs_once_and_a_process_that_dies_fails_one(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FILE)
    done = run(tmp_path, "--processes", "3")
    failed = {"test_alone[2]", "test_fatal[1]"}
    assert outcomes(tmp_path) == {
        **{f"test_together[{i}]": "passed" for i in range(6)},
        **{f"test_{name}[{i}]": "passed" for name in ("alone", "fatal") for i in range(4)},
        **dict.fromkeys(failed, "failure"),
        "test_skipped": "skipped",
    }
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 12 passed, 1 skipped, 4 warnings" in done.stdout
    assert "ended with signal 9" in done.stdout
    assert "printed 2" in done.stdout
    assert "printed 1" not in done.stdout
    for i in range(4):
        assert done.stdout.count(f"UserWarning: warned {i}") == 1
    noted = [line.split() for line in (tmp_path / "processes.txt").read_text().splitlines()]
    together = {pid for name, pid in noted if name in ("together", "undone")}
    assert len(together) == 1
    assert sorted(name for name, _ in noted) == sorted(["together"] * 6 + ["alone"] * 4 + ["undone"])


@pytest.mark.parametrize("job", [False, True])
def test_the_first_failure_ends_the_run_on_request(tmp_path: Path, job: bool) -> None:
    (tmp_path / "test_some.py").write_text(
        "import time, pytest\n"
        "@pytest.fixture\ndef made():\n    yield\n    open('undone', 'w').close()\n"
        "def test_fails(): assert False\n"
        "def test_waits(made): time.sleep(1000)\n" + "".join(f"def test_{i}(): pass\n" for i in range(20))
    )
    done = run(tmp_path, "--processes", "2", "-x", job=job)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in done.stdout
    assert (tmp_path / "undone").exists() or "test_waits" not in json.dumps(outcomes(tmp_path))


def test_a_process_that_dies_at_its_end_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import atexit, os, pytest\n"
        "@pytest.mark.parametrize('i', range(4))\n"
        "def test_some(i): atexit.register(os._exit, 7)\n"
    )
    done = run(tmp_path, "--processes", "2")
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR
    assert "ended with code 7 after its last test" in done.stdout


def test_errors_of_the_collection_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "test_other.py").write_text("def test(): pass\n")
    done = run(tmp_path, "--processes", "2")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "1 error" in done.stdout
