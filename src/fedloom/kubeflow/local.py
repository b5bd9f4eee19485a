"""Running a pipeline on this machine, with kfp's local runner.

The runner starts a process for each task, which may start processes of its own (a federation, its workers), and it
stops none of them when it is stopped itself. So it runs in a process group of its own, which is stopped as a whole;
``python -P -m fedloom.kubeflow.local`` is that process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from fedloom.errors import ExperimentError, FedloomError, InterruptedRun, argument
from fedloom.kubeflow import steps
from fedloom.kubeflow.compiling import parameters, pipeline
from fedloom.processes import TELL_PARENT, Told, environment, listen_to_parent, python, tell_failure

STOP_GRACE_S = 40.0
"""Seconds in which stopped processes may end in good order; a federation writes a checkpoint first."""

LOG = "pipeline.log"
RECORDS = "told.jsonl"
COLOURS = re.compile(r"\x1b\[\d+m")
TOLD = re.compile(
    rf"(Executing task '[^']+'|Task '[^']+' finished with status \w+|{re.escape(steps.MARK)}.*|error: .*)$"
)
"""What of the runner's output is progress; the rest goes to the log alone."""

CHECKS = {"plan", "grid"}
"""Tasks that only check settings: when one of them fails there is nothing to keep."""


def run(name: str, arguments: Mapping[str, Any], out: Path, *, say: Callable[[str], None], everything: bool) -> None:
    """Run a pipeline to its end.

    Parameters
    ----------
    name
        Of the pipeline.
    arguments
        Its parameters.
    out
        New folder: a folder for each task and in it what the task produced, ``pipeline.log``, and links to what a
        person looks for: ``run`` or ``runs/``, ``report.html`` or ``compare.html``, the same as ``.md``.
    say
        Is told how it goes, line by line; ``everything`` that the runner says, or progress alone.

    Raises
    ------
    FedloomError
        Of the class with which the task that failed ended.
    InterruptedRun
        If it was stopped; nothing that it started is left running.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExperimentError(f"{argument('out')} must be a new folder, and {out} exists.", key="out", found=out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        root, log = Path(folder) / "root", Path(folder) / LOG
        made = re.compile(rf"{re.escape(str(root))}/[^/\s]+")  # what lies there will lie in ``out``
        order = {"name": name, "arguments": dict(arguments), "root": str(root)}
        process = subprocess.Popen(
            python("-m", "fedloom.kubeflow.local"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=environment({**os.environ, "PYTHONSAFEPATH": "1"}, Path(folder) / RECORDS),
        )  # fmt: skip
        with _stopping(process, say) as stopped, log.open("w", encoding="utf-8") as file:
            _give(process, json.dumps(order))
            for line in _lines(process):
                line = made.sub(str(out), line)
                file.write(line)
                if everything or (told := TOLD.search(COLOURS.sub("", line))):
                    say(line.rstrip("\n") if everything else told[1].removeprefix(steps.MARK))  # type: ignore[index]
            code = process.wait()
            _ended(process.pid, STOP_GRACE_S)
        failure = _failure(Told(Path(folder) / RECORDS), code, log)
        if stopped.is_set():
            failure = InterruptedRun("stopped; nothing of it is left running")
        if failure is not None and not _worth_keeping(root):
            raise failure
        _keep(root, log, out)
    if failure is not None:
        message = made.sub(str(out), str(failure))
        raise type(failure)(f"{message}\n  what there is of it: {out}, log: {out / LOG}")


def _give(process: subprocess.Popen[str], order: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # it ended at once: its output says why
        process.stdin.write(order)


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    with process.stdout:
        yield from process.stdout


@contextmanager
def _stopping(process: subprocess.Popen[str], say: Callable[[str], None]) -> Iterator[threading.Event]:
    """Let SIGINT and SIGTERM stop the whole group; whatever happens in the block, nothing of it is left."""
    stopped = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if not stopped.is_set():
            say("stopping")
        again = stopped.is_set()
        stopped.set()
        _signal(process.pid, signal.SIGKILL if again else signal.SIGINT)
        if not again:
            threading.Thread(target=_ended, args=(process.pid, STOP_GRACE_S), daemon=True).start()

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; False if nothing of it is there."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _ended(group: int, grace_s: float) -> None:
    """Wait until a process group is empty, and empty it after a grace."""
    deadline = time.monotonic() + grace_s
    while _signal(group, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(group, signal.SIGKILL)


def _failure(told: Told, code: int, log: Path) -> FedloomError | None:
    """Return what a pipeline failed of: the first task that said so, or the pipeline itself."""
    if code == 0 or told.failure is not None:
        return told.failure
    raise RuntimeError(f"a task failed in a way it should not:\n{log.read_text(encoding='utf-8')[-4000:]}")


def _worth_keeping(root: Path) -> bool:
    return any({path.name for path in run.iterdir()} - CHECKS - {"cleanup"} for run in root.glob("*"))


def _keep(root: Path, log: Path, out: Path) -> None:
    """Move what the tasks produced to its place, and link what a person looks for."""
    out.mkdir(exist_ok=True)
    for task in (task for run in root.glob("*") for task in run.iterdir()):
        shutil.move(task, out / task.name)
    shutil.move(log, out / LOG)
    for path, suffix in ((p, s) for name, s in (("page", ".html"), ("table", ".md")) for p in out.glob(f"*/{name}")):
        (out / f"{path.parent.name}{suffix}").symlink_to(path.relative_to(out))
    if (out / "federate" / "model").is_dir():
        (out / "run").symlink_to("federate/model")
    for model in out.glob("for-loop-*/federate/model"):
        (out / "runs").mkdir(exist_ok=True)
        about = json.loads((model.parent / "executor_output.json").read_text(encoding="utf-8"))
        label = about["artifacts"]["model"]["artifacts"][0]["metadata"]["label"]
        (out / "runs" / label).symlink_to(Path("..") / model.relative_to(out))


def _here(order: TextIO) -> None:
    """Run a pipeline in this process, as standard input says."""
    wanted = json.load(order)
    known = parameters(wanted["name"])
    missing = [key for key, needed in known.items() if needed and key not in wanted["arguments"]]
    unknown = [key for key in wanted["arguments"] if key not in known]
    if missing or unknown:
        found = f"no {', '.join(missing)}" if missing else ", ".join(unknown)
        raise ExperimentError(f"{wanted['name']}: found {found}; allowed: {', '.join(known)}")
    from kfp import local

    warnings.filterwarnings("ignore", module=r"kfp\.")  # images, memory and Secrets mean nothing here
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=wanted["root"])
    try:
        pipeline(wanted["name"])(**wanted["arguments"])
    except RuntimeError as error:  # the runner's way to say that a task failed
        if not Path(os.environ[TELL_PARENT]).exists():
            raise
        raise SystemExit(1) from error


if __name__ == "__main__":
    # We are stopped by it. A shell that starts us in the background has it ignored, which processes inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _here(sys.stdin)
    except (FedloomError, KeyboardInterrupt) as error:
        failed = error if isinstance(error, FedloomError) else InterruptedRun("stopped")
        listen_to_parent()  # until now the tasks did
        tell_failure(failed)
        print(f"error: {failed}", flush=True)
        sys.exit(int(failed.exit_code))
