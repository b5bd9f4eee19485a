"""Execution of a pipeline on this machine, with kfp's local runner.

The runner starts a process for each task, which may start more processes (a federation and its workers), and stops
none of them when it is stopped itself. It therefore runs in its own process group, which is stopped as a whole;
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

from fedloom.core.files import storing
from fedloom.core.processes import TELL_PARENT, ChildReport, environment, listen_to_parent, python, tell_failure
from fedloom.errors import ExperimentError, FedloomError, InterruptedRun, argument, without_secrets
from fedloom.kubeflow import steps
from fedloom.kubeflow.catalog import check_parameters, pipeline

STOP_GRACE_S = 40.0
"""Seconds for stopped processes to exit cleanly; a federation first writes a checkpoint."""

LOG = "pipeline.log"
RECORDS = "reports.jsonl"
COLOURS = re.compile(r"\x1b\[\d+m")
PROGRESS = re.compile(
    rf"(Executing task '[^']+'|Task '[^']+' finished with status \w+|{re.escape(steps.MARK)}.*|error: .*)$"
)
"""Pattern of the runner's output lines that are progress; the others only go to the log."""

CHECKS = {"plan", "grid"}
"""Tasks that only check settings: if one of them fails, there is nothing to keep."""


def run_pipeline(
    name: str, arguments: Mapping[str, Any], out: Path, *, say: Callable[[str], None], everything: bool
) -> None:
    """Run a pipeline to its end.

    Raise the error of the task that failed; InterruptedRun if it was stopped; no process that it started
    is left running.

    Parameters
    ----------
    name
        Name of the pipeline.
    arguments
        Its parameters.
    out
        New folder: a folder for each task with its outputs, ``pipeline.log``, and links to the main results: ``run`` or
        ``runs/``, ``report.html`` or ``compare.html``, and the same as ``.md``.
    say
        Called with lines of progress or, with ``everything``, with all of the runner's output.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExperimentError(f"{argument('out')} must be a new folder, and {out} exists.", key="out", found=out)
    with storing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        root, log = Path(folder) / "root", Path(folder) / LOG
        temporary_path = re.compile(rf"{re.escape(str(root))}/[^/\s]+")  # these files will be moved to ``out``
        order = {"name": name, "arguments": dict(arguments), "root": str(root)}
        process = subprocess.Popen(
            python("-m", "fedloom.kubeflow.local"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=environment({**os.environ, "PYTHONSAFEPATH": "1"}, Path(folder) / RECORDS),
        )  # fmt: skip
        with _stopping(process, say) as stop_event, log.open("w", encoding="utf-8") as file:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError), process.stdin:  # it exited immediately: its output gives the reason
                process.stdin.write(json.dumps(order))
            for line in process.stdout:
                line = without_secrets(temporary_path.sub(str(out), line))
                with storing(log):
                    file.write(line)
                if everything or (progress := PROGRESS.search(COLOURS.sub("", line))):
                    say(line.rstrip("\n") if everything else progress[1].removeprefix(steps.MARK))  # type: ignore[index]
            code = process.wait()
            _ended(process.pid, STOP_GRACE_S)
        failure = ChildReport(Path(folder) / RECORDS).failure
        if failure is None and code != 0 and not stop_event.is_set():
            raise RuntimeError(f"a task failed unexpectedly:\n{log.read_text(encoding='utf-8')[-4000:]}")
        if stop_event.is_set():
            failure = InterruptedRun("stopped, with all its processes")
        finished = {path.name for path in root.glob("*/*")} - {*CHECKS, "cleanup"}
        if failure is not None and not finished:
            raise failure
        with storing(out):
            _keep(root, log, out)
    if failure is not None:
        message = temporary_path.sub(str(out), str(failure))
        raise type(failure)(f"{message}\n  partial results: {out}, log: {out / LOG}")


@contextmanager
def _stopping(process: subprocess.Popen[str], say: Callable[[str], None]) -> Iterator[threading.Event]:
    """Let SIGINT and SIGTERM stop the whole process group; however the block ends, no process of it is left."""
    stop_event = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if not stop_event.is_set():
            say("stopping")
        is_repeated = stop_event.is_set()
        stop_event.set()
        _signal(process.pid, signal.SIGKILL if is_repeated else signal.SIGINT)
        if not is_repeated:
            threading.Thread(target=_ended, args=(process.pid, STOP_GRACE_S), daemon=True).start()

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop_event
    finally:
        for number, previous in handlers.items():
            signal.signal(number, previous)
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; return False if the group has no processes."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _ended(group: int, grace_s: float) -> None:
    """Wait until a process group is empty; kill what remains after a grace period."""
    deadline = time.monotonic() + grace_s
    while _signal(group, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(group, signal.SIGKILL)


def _keep(root: Path, log: Path, out: Path) -> None:
    """Move the tasks' outputs into place, and link the main results."""
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
        output = json.loads((model.parent / "executor_output.json").read_text(encoding="utf-8"))
        label = output["artifacts"]["model"]["artifacts"][0]["metadata"]["label"]
        (out / "runs" / label).symlink_to(Path("..") / model.relative_to(out))


def _here(order: TextIO) -> None:
    """Run a pipeline in this process, as specified on standard input."""
    order_read = json.load(order)
    check_parameters(order_read["name"], order_read["arguments"])
    from kfp import local

    warnings.filterwarnings("ignore", module=r"kfp\.")  # images, memory and Secrets do not apply here
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=order_read["root"])
    try:
        pipeline(order_read["name"])(**order_read["arguments"])
    except RuntimeError as error:  # the runner's error for a failed task
        if not Path(os.environ[TELL_PARENT]).exists():
            raise
        raise SystemExit(1) from error


if __name__ == "__main__":
    # SIGINT stops this process. A shell that starts it in the background sets SIGINT to ignored, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _here(sys.stdin)
    except (FedloomError, KeyboardInterrupt) as error:
        failed = error if isinstance(error, FedloomError) else InterruptedRun("stopped")
        listen_to_parent()  # so far the tasks did this
        tell_failure(failed)
        print(f"error: {failed}", flush=True)
        sys.exit(int(failed.exit_code))
