"""Failures of the command line: exit codes, messages of one screen, no files written."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from facts import tells

from fedloom import __version__
from fedloom.core.files import storing
from fedloom.errors import ExitCode, StorageError
from fedloom.transport.versions import PROTOCOL

Fedloom = Callable[..., tuple[int, str, str]]

EXPERIMENT = """\
name: small
data:
  dataset: fashion-mnist
  partition: {scheme: iid, clients: 10}
model: {name: logistic}
algorithm: {name: fedavg}
federation: {rounds: 2}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(EXPERIMENT)
    return path


def test_version_and_help(fedloom: Fedloom) -> None:
    code, out, err = fedloom("--version")
    assert (code, err) == (0, "")
    assert tells(out, f"fedloom {__version__}", "protocol", PROTOCOL)
    code, out, _ = fedloom("--help")
    assert code == 0
    assert "partition" in out


@pytest.mark.parametrize(
    "words", ["", "nope", "--nope", "data", "data fetch", "partition", "partition a b", "schema --out"]
)
def test_usage_errors(fedloom: Fedloom, words: str) -> None:
    code, _, err = fedloom(*words.split())
    assert code == ExitCode.EXPERIMENT
    assert "Traceback" not in err


def test_an_error_in_the_file_writes_nothing(fedloom: Fedloom, experiment: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, out, err = fedloom("partition", experiment, "--set", "data.partition.clients=ten", "--out", "there")
    assert (code, out) == (ExitCode.EXPERIMENT, "")
    assert len(err.splitlines()) == 2
    assert tells(err, experiment, "--set data.partition.clients: ", "a valid integer", '"ten"')
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "code", "facts", "lines"),
    [
        ("partition absent.yaml", ExitCode.EXPERIMENT, ["error: absent.yaml", "no such file"], 1),
        ("partition small.yaml --out .", ExitCode.EXPERIMENT, ["a new folder"], 1),
        ("partition small.yaml", ExitCode.DATA, ["fedloom data fetch fashion-mnist"], 2),
        ("data fetch nope", ExitCode.EXPERIMENT, ["nope", "fashion-mnist"], 1),
        (
            "certificates ca --out small.yaml/x",
            ExitCode.STORAGE,
            ["error: small.yaml/x", "directory", "fix the path"],
            2,
        ),
    ],
)
@pytest.mark.usefixtures("experiment")
def test_an_error_is_one_screen(fedloom: Fedloom, words: str, code: ExitCode, facts: list[str], lines: int) -> None:
    found, _, err = fedloom(*words.split())
    assert (found, err.count("\n")) == (code, lines)
    assert tells(err, *facts)
    assert "Traceback" not in err
    assert "Traceback" in fedloom("--verbose", *words.split())[2]


def test_schema_is_json(fedloom: Fedloom) -> None:
    code, out, _ = fedloom("schema")
    assert code == 0
    assert json.loads(out)["properties"].keys() >= {"name", "data", "model", "algorithm", "federation"}


@pytest.mark.slow
def test_a_full_disk_is_reported() -> None:
    full = Path("/dev/full")
    with pytest.raises(StorageError) as refused, storing(full):
        full.write_text("text")
    assert tells(str(refused.value), full, "no space left on device", "free some space")
    with full.open("w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "fedloom", "schema"], stdout=out, stderr=subprocess.PIPE, text=True, timeout=240
        )
    assert (done.returncode, done.stderr) == (ExitCode.STORAGE, "error: no space left on device\n")


def test_keyboard_interrupt() -> None:
    """Ctrl-C while the command waits for an experiment from an unresponsive store."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; a child would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = {
            "FEDLOOM_S3_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "fedloom", "partition", "s3://bucket/experiment.yaml"],
            env={**os.environ, **store},
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            asked, _ = silent.accept()
            with asked:
                assert asked.recv(1)  # the command now only waits
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in err


def test_the_documented_exit_codes_match_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    documented = {int(code): name for code, name in re.findall(r"^\| (\d+) \| `(\w+)`", page, re.MULTILINE)}
    assert documented == {code.value: code.name for code in ExitCode}
    never = {int(code) for code in re.findall(r"^\| (\d+) .*\| never \|$", page, re.MULTILINE)}
    assert never == {ExitCode.EXPERIMENT, ExitCode.DATA, ExitCode.REFUSED}


def test_sigterm_ends_a_command_that_is_still_importing() -> None:
    # Before a command installs its own handlers: in a container, nothing else would end its first process.
    program = (
        "import os, signal, time\n"
        "from fedloom.cli import main\n"
        "main.app = lambda **_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "error: stopped on request\n")
