"""Forked processes of tests (``forked.py``) behave like newly started ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import Popen, children, cmdline, run

WAYS = pytest.mark.parametrize("way", [run, subprocess.run], ids=["forked", "started"])
Way = Callable[..., subprocess.CompletedProcess[Any]]


@WAYS
@pytest.mark.parametrize(
    ("code", "ends", "says"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
        ("import threading, time; threading.Timer(0.1, print, ['later']).start()", 0, "later"),
    ],
)
def test_exit_codes(way: Way, code: str, ends: int, says: str) -> None:
    done = way([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == ends
    assert says in done.stdout + done.stderr
    assert bool(done.stdout + done.stderr) is bool(says)


@WAYS
def test_arguments_environment_and_files(way: Way, tmp_path: Path) -> None:
    code = (
        "import os, sys, tempfile; print(sys.argv[1:], os.getcwd(), os.environ['ASKED'], 'HOME' in os.environ, "
        "sys.stdin.read(), os.getsid(0) == os.getpid(), tempfile.gettempdir(), sorted(os.listdir('/proc/self/fd'))[:3])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {"ASKED": "so", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code, "a b", ""]
    done = way(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"['a b', ''] {tmp_path} so False  True {tmp_path} ['0', '1', '2']\n"


@WAYS
@pytest.mark.parametrize("also", ["", "PYTHONPATH"])
def test_search_path(way: Way, also: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of_a_test.py").write_text(f"print({name!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "c"))
    given = {"PYTHONPATH": os.pathsep.join(["a", str(tmp_path / "b"), "a"])}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (given if also else {})
    command = [sys.executable, "-c", "import sys; print(sys.path[:3]); import of_a_test"]
    done = way(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if also:
        assert done.stdout == f"{['', str(tmp_path / 'a'), str(tmp_path / 'b')]}\na\n"
    else:
        assert "ModuleNotFoundError" in done.stderr


@WAYS
@pytest.mark.parametrize("flags", [[], ["-u"], ["-P", "-u"]])
@pytest.mark.parametrize("value", ["", "1"])
def test_buffers_and_compiled_modules(way: Way, flags: list[str], value: str) -> None:
    code = "import sys; print(sys.stdout.write_through, sys.dont_write_bytecode, sys.path[0])"
    names = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONSAFEPATH")
    environment = os.environ | dict.fromkeys(names, value)
    done = way([sys.executable, *flags, "-c", code], env=environment, capture_output=True, text=True)
    first = done.stdout.split()[2:] or [""]
    assert done.stdout.split()[:2] == [str(bool(value or flags)), str(bool(value))]
    assert (first == [""]) is ("-P" not in flags and not value)


@pytest.mark.slow
@WAYS
def test_a_task_of_a_pipeline(way: Way) -> None:
    """Start one as Kubeflow compiles it; only a fork has torch without importing it."""
    spec = next(yaml.safe_load_all((Path(__file__).parents[2] / "pipelines" / "unseen_clients.yaml").read_text()))
    shell, flags, program, _ = spec["deploymentSpec"]["executors"]["exec-plan"]["container"]["command"]
    source = "import os, sys; print(os.environ['_KFP_RUNTIME'], 'torch' in sys.modules, *sys.argv[2:]); sys.exit(3)"
    command = [shell, flags, program.replace("python3", sys.executable), source, "--executor_input", "{}"]
    done = way([*command, "--function_to_execute", "one"], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("true ")]
    _, torch, file, *arguments = line.split()
    assert (torch, Path(file).read_text()) == (str(way is run), source)
    assert arguments == ["--executor_input", "{}", "--function_to_execute", "one"]


@pytest.mark.slow
@WAYS
def test_packages_on_the_search_path_provide_their_plugins(way: Way, tmp_path: Path) -> None:
    about = tmp_path / "odd-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[fedloom.algorithms]\nodd = nowhere:ODD\n")
    code = "import sys; print('fedloom' in sys.modules); from fedloom.algorithms import base; print(*base.available())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = way([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    before, names = done.stdout.splitlines()
    assert before == "False"
    assert {"odd", "fedavg"} <= set(names.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_forked_process_is_a_child_that_receives_signals(number: signal.Signals) -> None:
    command = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"ready\n"
        assert process.pid in children(os.getpid())
        assert cmdline(process.pid) == command
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(30) == -number


def test_a_process_started_by_a_fork_is_its_child() -> None:
    code = (
        "import os, subprocess, sys\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import os; print(os.getppid(), flush=True); input()'],\n"
        "    stdin=subprocess.PIPE)\n"
        "inner.communicate(b'go')\n"
        "print(os.getpid(), inner.returncode, len(os.listdir('/proc/self/task')))\n"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True)
    parent, output = done.stdout.splitlines()
    assert output == f"{parent} 0 1"


def test_only_installed_commands_are_forked() -> None:
    done = run([str(Path(sys.executable).with_name("fedloom")), "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "fedloom")
    assert run(["sh", "-c", "exit 3"]).returncode == 3
