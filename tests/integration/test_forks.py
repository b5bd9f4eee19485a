"""Children that fork a command: what they take over, how they end, and when a new interpreter is started instead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from forked import cmdline
from run_processes import ENVIRONMENT, WAIT_S, alive, experiment, rounds, started, until, worker

from fedloom.cli.main import program as program_of_fedloom

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere children are new interpreters")

PREPARED = """
import os, signal, sys, threading, time
from pathlib import Path
from fedloom.core import forks

forks.is_caught = {caught}
try:
    with forks.prepared(True):
        {first}
except forks.Forked as fork:
    facts = [*fork.words, os.environ.get("GIVEN"), "HOME" in os.environ, sys.path[0], sys.stdin.read()]
    print(facts, Path(f"/proc/{{os.getpid()}}/cmdline").read_bytes().strip(b"\\0"), file=sys.stderr)
    print("unseen")
    sys.exit(10 * (os.getsid(0) == os.getpid()) + len(os.sched_getaffinity(0)))

def child(*words, then="from the parent"):
    with open("stderr", "ab") as stderr:
        environment = {{"GIVEN": "a variable", "PYTHONPATH": "/somewhere", "PATH": os.environ["PATH"]}}
        process = forks.Child(words, stderr, environment, [min(os.sched_getaffinity(0))])
    process.stdin.write(then.encode())
    process.stdin.close()
    return process

{then}
"""
COPY = "int(Path(f'/proc/self/task/{os.getpid()}/children').read_text())"


def program(folder: Path, first: str, then: str, *, caught: bool = True) -> str:
    """Run a program with a copy of itself; return what its children wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", PREPARED.format(first=first, then=then, caught=caught)],
        cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return (folder / "stderr").read_text()


def test_a_fork_takes_over_words_variables_files_session_and_cores(tmp_path: Path) -> None:
    told = program(tmp_path, "pass", "assert forks._copy\nassert child('one', 'two words').wait(60) == 11")
    assert told.startswith("['one', 'two words', 'a variable', False, '/somewhere', 'from the parent']")
    assert told.rstrip("'\n").endswith(r"fedloom\x00one\x00two words")  # other programs see its command line


def test_forks_are_children_that_are_signalled_and_end_one_by_one(tmp_path: Path) -> None:
    endless = "forks.json.loads = lambda text: time.sleep(600)"  # a fork reads its message before it begins
    then = "many = [child(str(i)) for i in range(5)]\nassert len({one.pid for one in many}) == 5\n"
    then += (
        "for one in many:\n    assert one.poll() is None\n    one.kill()\n    assert one.wait(60) == -signal.SIGKILL"
    )
    program(tmp_path, endless, then)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "assert forks._copy is None"),
        ("import mmap; open('libcuda.so.1', 'wb').write(b'0' * 4096); f = open('libcuda.so.1', 'r+b'); "
         "m = mmap.mmap(f.fileno(), 4096)", "assert forks._copy is None"),
        (
            "pass",
            f"os.kill(copy := {COPY}, signal.SIGKILL)\nos.waitid(os.P_PID, copy, os.WEXITED | os.WNOWAIT)",
        ),
    ],
    ids=["threads", "a GPU's driver", "the copy was killed"],
)  # fmt: skip
def test_a_new_interpreter_is_started_where_forks_are_unsafe_or_gone(tmp_path: Path, first: str, then: str) -> None:
    told = program(tmp_path, first, f"{then}\nassert child('weave').wait(120) == 2")
    assert "No such command 'weave'" in told


def test_a_program_that_would_not_catch_the_exception_of_a_fork_is_not_forked(tmp_path: Path) -> None:
    told = program(tmp_path, "pass", "assert forks._copy is None\nassert child('weave').wait(120) == 2", caught=False)
    assert "No such command 'weave'" in told


def test_only_the_program_catches_the_exception_of_a_fork() -> None:
    """A caller of main may catch its exit, as pytest does, and would go on in every fork."""
    called = "import sys; from fedloom.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    for start, caught in ((called, False), ("import runpy; runpy.run_module('fedloom', run_name='__main__')", True)):
        told = "import atexit; from fedloom.core import forks; atexit.register(lambda: print(forks.is_caught))"
        done = subprocess.run(
            [sys.executable, "-c", f"{told}\n{start}", "--version"], env=ENVIRONMENT, capture_output=True, text=True,
            timeout=WAIT_S,
        )  # fmt: skip
        assert done.stdout.splitlines()[1:] == [str(caught)], done.stderr
    (script,) = entry_points(group="console_scripts", name="fedloom")
    assert script.load() is program_of_fedloom


@pytest.mark.parametrize("ending", ["pass", "os._exit(0)", "os.execv('/bin/true', ['true'])"])
def test_the_copy_ends_with_the_process_that_left_it(ending: str, tmp_path: Path) -> None:
    program(tmp_path, "pass", f"open('stderr', 'w').write(str({COPY}))\n{ending}")
    copy = int((tmp_path / "stderr").read_text())
    until(lambda: not alive(copy), "the end of the copy")


@pytest.mark.slow
def test_workers_of_a_command_are_forks_and_are_replaced_by_forks(tmp_path: Path, fashion_mnist_root: Path) -> None:
    path = experiment(tmp_path, fashion_mnist_root, runtime={"workers": 2})
    run = tmp_path / "run"
    with started("run", path, "--out", run, "--set", "federation.rounds=100000") as process:
        for attempt in range(2):
            until(lambda: worker(process, "worker-1"), "a worker")
            pid = worker(process, "worker-1")
            assert pid is not None
            assert cmdline(pid)[:4] == [sys.executable, "-P", "-m", "fedloom"]
            # Its first environment is the command's: a new interpreter would have begun with the run's own token.
            assert b"FEDLOOM_TOKEN=" not in Path(f"/proc/{pid}/environ").read_bytes()
            known = rounds(run) if attempt else 0
            until(lambda known=known: (run / "journal.jsonl").exists() and rounds(run) > known + 1, "rounds")
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: worker(process, "worker-1") not in (None, pid), "another worker")


@pytest.mark.slow
def test_a_run_with_closed_standard_files_trains(tmp_path: Path, fashion_mnist_root: Path) -> None:
    path = experiment(tmp_path, fashion_mnist_root, runtime={"workers": 1})
    command = [sys.executable, "-m", "fedloom", "run", str(path), "--out", str(tmp_path / "run")]
    shell = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash"]
    assert subprocess.run([*shell, *command], env=ENVIRONMENT, timeout=WAIT_S).returncode == 0
    assert rounds(tmp_path / "run") == 4
