"""Worker processes of ``fedloom run``: start, supervision, restart and cleanup."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import SecretStr

from fedloom.core.options import as_words
from fedloom.core.processes import ChildReport, command, environment
from fedloom.errors import DataError, ExperimentError, FedloomError, RefusedError, WorkerLostError, argument
from fedloom.models.factories import FACTORIES
from fedloom.runner.options import WorkerOptions
from fedloom.security.options import FILES, TOKEN
from fedloom.storage.folder import open_to_append, read_file, storing

log = logging.getLogger("fedloom.workers")

RESTARTS = 2
FINAL = (ExperimentError, DataError, RefusedError)
"""Errors reported by a worker that a restart would only repeat; an exit code alone does not identify them."""


class Workers:
    """Supervisor of ``fedloom worker`` processes on this machine.

    A worker stops when its standard input closes, which happens even if this process is killed.

    Parameters
    ----------
    options
        Options of each ``fedloom worker``.
    token
        Authenticates the workers; passed in their environment, which other users of the machine cannot read.
    code
        Factory of the clients' model and metrics, if they are the user's own; these workers may call them.
    on_failure
        Called once, in another thread, when a worker is lost for good; ``failure`` holds the error.
    """

    def __init__(
        self,
        count: int,
        options: WorkerOptions,
        logs: Path,
        token: SecretStr,
        code: Sequence[str],
        address: str,
        on_failure: Callable[[], None],
    ) -> None:
        self.failure: FedloomError | None = None
        self._address = address
        others = {*FILES.values(), TOKEN}  # credentials in the environment are for another aggregator
        self._environment = {name: value for name, value in os.environ.items() if name not in others}
        self._environment[TOKEN] = token.get_secret_value()
        if code:
            self._environment[FACTORIES] = ",".join(code)
        self._code = code
        self._temporary = tempfile.TemporaryDirectory(prefix="fedloom-workers-")
        self._options = options
        self._logs = logs
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._reports: dict[int, Path] = {}
        self._watchers = [threading.Thread(target=self._watch, args=(i,), daemon=True) for i in range(count)]
        for i in range(count):
            self._processes[i] = self._start(i)
        for watcher in self._watchers:
            watcher.start()

    def stop_restarting(self) -> None:
        """Stop restarting workers, because the run is over."""
        with self._lock:
            self._stopping.set()

    def stop(self, grace_s: float = 5.0) -> None:
        """Stop all workers; kill those that do not exit within ``grace_s``."""
        self.stop_restarting()
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in processes:
            try:
                process.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for watcher in self._watchers:
            watcher.join()
        self._temporary.cleanup()

    def _start(self, i: int) -> subprocess.Popen[bytes]:
        name = f"worker-{i}"
        log_setting = f"log={json.dumps(str(self._logs / f'{name}.jsonl'))}"
        options = replace(self._options, settings=(*self._options.settings, log_setting))
        words = ["worker", "--aggregator", self._address, "--name", name, *as_words(options)]
        folder = Path(self._temporary.name)
        self._reports[i] = folder / f"{name}-{len(list(folder.iterdir()))}.jsonl"
        self._reports[i].touch()
        # A separate session, so that Ctrl-C reaches this process only and the current round can end.
        with storing(log_file := self._logs / f"{name}.stderr"):
            descriptor = open_to_append(log_file)
        with os.fdopen(descriptor, "ab") as stderr:
            return subprocess.Popen(
                command(*words),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                env=environment(self._environment, self._reports[i], self._code, ends_with_parent=True),
            )

    def _watch(self, i: int) -> None:
        for restart in range(RESTARTS + 1):
            with self._lock:
                process = self._processes[i]
            code = process.wait()
            if process.stdin is not None:
                process.stdin.close()
            if self._stopping.is_set():
                return
            log.warning("worker-%d (pid %d) ended with code %d", i, process.pid, code)
            report = ChildReport(self._reports[i])
            if isinstance(report.failure, FINAL):
                self._fail(report.failure.within(f"worker-{i}"))
                return
            if restart < RESTARTS:
                with self._lock:
                    if self._stopping.is_set():
                        return
                    self._processes[i] = self._start(i)
        why = f"failed: {report.failure.message}" if report.failure else report.ended(code, self._stderr(i))
        self._fail(
            WorkerLostError(
                f"worker-{i} {why} (after {RESTARTS} restarts)",
                hint=f"see {self._logs / f'worker-{i}.jsonl'}; continue with {argument('resume')}",
            )
        )

    def _fail(self, failure: FedloomError) -> None:
        with self._lock:
            first, self.failure = self.failure is None, self.failure or failure
        if first:
            self._on_failure()

    def _stderr(self, i: int) -> str:
        try:
            return read_file(self._logs / f"worker-{i}.stderr").decode(errors="replace")
        except OSError:
            return ""
