"""Aggregator and worker processes of a distributed run."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from fedloom.core.files import open_to_append, read_file, storing
from fedloom.core.forks import Child
from fedloom.core.options import as_words
from fedloom.core.processes import ChildReport, environment
from fedloom.engine.assemble import DTYPE, RunContext
from fedloom.engine.constants import digests_of_run
from fedloom.engine.metrics import certificate_end, federation_families, metrics_served
from fedloom.engine.options import ServingOptions, WorkerOptions
from fedloom.engine.stop_request import StopRequest
from fedloom.errors import (
    DataError,
    ExperimentError,
    FedloomError,
    InterruptedRun,
    QuorumError,
    RefusedError,
    WorkerLostError,
    argument,
)
from fedloom.experiment import OwnData
from fedloom.federation.measuring import VOCABULARY
from fedloom.federation.monitor import Control, Monitor
from fedloom.federation.roster import AvailableClients
from fedloom.models.factories import FACTORIES
from fedloom.security.audit import Audit
from fedloom.security.options import FILES, TOKEN, Protection
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.control_service import ProgressPublisher
from fedloom.transport.exchanges import ServedRun
from fedloom.transport.personalization import Personalization

GRACE_S = 5.0
"""Seconds to wait at the end for watchers to receive the final state."""


@dataclass(frozen=True)
class Serving:
    """Running aggregator, its progress publisher and its address."""

    server: Aggregator
    notices: ProgressPublisher
    address: str


@dataclass(frozen=True)
class ServingSettings:
    """Settings of an aggregator process.

    Attributes
    ----------
    options
        Addresses.
    protection, audit
        Access rules, and the audit log.
    incarnation
        Id of this process's incarnation.
    drain, resumed
        True to wait for external workers that lost their connection, and True for a resumed run.
    """

    options: ServingOptions
    protection: Protection
    audit: Audit
    incarnation: str
    drain: bool = False
    resumed: bool = False


@contextmanager
def serving(
    parts: RunContext,
    settings: ServingSettings,
    say: Callable[[str], None],
    *,
    presence: AvailableClients | None = None,
    monitor: Monitor | None = None,
    control: Control | None = None,
    models: Personalization | None = None,
    stay: Callable[[], None] | None = None,
) -> Iterator[Serving]:
    """Run an aggregator until the block has ended and watchers and workers have been notified of the outcome.

    For an interrupted run, watchers see the connection break, since the run has not ended. Workers are notified that
    the run is over only after the block has succeeded. If it fails, even after the last round, a restarted aggregator
    retries, and it needs the workers to evaluate once more.

    Parameters
    ----------
    say
        Shows a line to the user, e.g. that clients have no worker.
    presence
        Record of connected clients, for an open federation.
    models
        Service for models of the last durable round.
    stay
        Function that blocks, after the block has succeeded, until the process is asked to exit. Meanwhile watchers see
        that the run has finished, and workers stay connected. Afterwards workers reconnect, as another process may
        continue the run. None: exit at once, and workers with it.

    Raise ExperimentError if the port is taken or the address cannot be bound.
    """
    e, monitor = parts.experiment, monitor or Monitor()
    monitor.know(parts.manifest.clients)
    monitor.enter("waiting", "waiting for workers")
    notices = ProgressPublisher(monitor)
    run = ServedRun(
        name=e.name,
        incarnation=settings.incarnation,
        experiment=welcome(parts),
        algorithm=parts.algorithm.name,
        version=parts.algorithm.version,
        vocabulary={**parts.vocabulary, **({} if presence is None else VOCABULARY)},
        dtype=DTYPE,
        clients=[entry.id for entry in parts.manifest.clients],
        roster=parts.manifest.roster,
        presence=presence,
        classes=parts.manifest.spec.classes,
    )
    server = Aggregator(
        run,
        protection=settings.protection,
        audit=settings.audit,
        monitor=monitor,
        notices=notices,
        control=control,
        models=models,
        say=say,
        health=settings.options.health,
    )
    address = server.start(settings.options.listen)

    def families() -> Iterator[Any]:
        load = None if models is None else models.load
        return federation_families(server.activity(), load, certificate_end(settings.protection))

    try:
        with metrics_served(settings.options.metrics, families):
            yield Serving(server, notices, address)
            if stay is not None:
                notices.tell("finished")
                stay()
            server.shutdown_workers(finished=stay is None)
            notices.tell("finished")
            notices.read_within(GRACE_S)
            if settings.drain and stay is None:
                server.drain(settings.resumed)
    except (InterruptedRun, KeyboardInterrupt):
        raise
    except BaseException as error:
        notices.tell("failed", str(error) or type(error).__name__)
        notices.read_within(GRACE_S)
        raise
    finally:
        server.stop()


@contextmanager
def with_workers(
    serving: Serving,
    parts: RunContext,
    workers: partial[Workers] | None,
    stop_request: StopRequest,
    options: ServingOptions | None,
) -> Iterator[None]:
    """Set up workers for training: the run's own, or external ones.

    The run's own workers leave at the end of the block. External ones stay until :func:`serving` ends, unless the
    block fails. ``workers`` starts the run's own, given the address and ``on_failure``; None: they connect from
    elsewhere. ``options`` set the timeout for them, and when a run without watchers stops; None for own workers.

    Raise QuorumError if clients are not served in time; the error of the run's own workers if that stopped the run;
    AbandonedError if the run stopped for lack of watchers; InterruptedRun if it was stopped while waiting for workers.
    """

    def abort() -> None:
        stop_request.event.set()
        serving.server.shutdown_workers()

    stop_request.abort = abort
    own = None if workers is None else workers(address=serving.address, on_failure=abort)
    finished = False
    try:
        with stop_request.when_unwatched(
            lambda: serving.notices.unwatched_s, None if options is None else options.orphan_after_s
        ):
            serving.notices.tell("waiting", "waiting for workers")
            if parts.manifest.clients:  # in an open federation, the roster waits
                # There is no time limit for the run's own workers: one that is lost for good aborts the wait.
                within_s = threading.TIMEOUT_MAX if options is None else options.wait_s
                count = 1 if own is None else parts.experiment.runtime.workers
                serving.server.wait_for([entry.id for entry in parts.manifest.clients], within_s, workers=count)
            stop_request.training = True
            serving.notices.tell("training")
            yield
        finished = True
    except BaseException as error:
        if (cause := _cause(error, own, stop_request)) is not None:
            raise cause from error
        raise
    finally:
        if own is not None:
            own.stop_restarting()
        if own is not None or not finished:
            serving.server.shutdown_workers(finished)
        if own is not None:
            own.stop()


def _cause(error: BaseException, own: Workers | None, stop_request: StopRequest) -> FedloomError | None:
    """Return the underlying cause of an error of the loop, such as the loss of all clients; None if there is none."""
    if own is not None and own.failure is not None:
        return own.failure
    if stop_request.reason is not None and isinstance(error, InterruptedRun | QuorumError):
        return stop_request.reason
    if stop_request.event.is_set() and isinstance(error, QuorumError):
        return InterruptedRun(f"stopped while waiting for workers; continue with {argument('resume')}")
    return None


def welcome(parts: RunContext) -> str:
    """Return the welcome message for workers: the shared part of the experiment and the partition's fingerprint.

    Clients with data of their own get the normalization instead of the fingerprint; null until it is known. Digests of
    the run's constants follow, if it has some.
    """
    document: dict[str, Any] = {"partition": parts.manifest.fingerprint}
    if isinstance(parts.experiment.data, OwnData):
        spec = parts.manifest.spec
        document = {"normalization": vars(spec.normalization) if spec.is_normalized else None}
    if constants := digests_of_run(parts):
        document["constants"] = constants
    return json.dumps({"experiment": parts.experiment.shared_json(), **document})


# --- own workers ------------------------------------------------------------------------------------------------------

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
        self._processes: dict[int, Child] = {}
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

    def _start(self, i: int) -> Child:
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
            return Child(
                words, stderr, environment(self._environment, self._reports[i], self._code, ends_with_parent=True)
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
        reason = f"failed: {report.failure.message}" if report.failure else report.ended(code, self._stderr(i))
        self._fail(
            WorkerLostError(
                f"worker-{i} {reason} (after {RESTARTS} restarts)",
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
