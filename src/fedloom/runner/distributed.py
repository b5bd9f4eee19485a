"""Aggregator and workers of a run whose clients are in other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedloom.errors import InterruptedRun, QuorumError, argument
from fedloom.federation.control import Control
from fedloom.federation.loop import vocabulary
from fedloom.federation.measuring import VOCABULARY
from fedloom.federation.monitor import Monitor
from fedloom.federation.roster import AvailableClients
from fedloom.runner import assemble
from fedloom.runner.assemble import RunContext
from fedloom.runner.metrics import certificate_end, federation_families, metrics_served
from fedloom.runner.stop_request import StopRequest
from fedloom.runner.worker_processes import Workers
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.notices import ProgressPublisher
from fedloom.transport.personalization import Personalization
from fedloom.transport.served_run import ServedRun
from fedloom.trust.audit import Audit
from fedloom.trust.options import Protection


@dataclass(frozen=True)
class Serving:
    """Running aggregator, its progress publisher and its address."""

    server: Aggregator
    notices: ProgressPublisher
    address: str


@contextmanager
def serving(
    parts: RunContext,
    listen: str,
    protection: Protection,
    audit: Audit,
    incarnation: str,
    grace_s: float,
    say: Callable[[str], None],
    *,
    lingers: bool,
    resumed: bool,
    presence: AvailableClients | None = None,
    monitor: Monitor | None = None,
    control: Control | None = None,
    models: Personalization | None = None,
    health: str | None = None,
    metrics: str | None = None,
    stay: Callable[[], None] | None = None,
) -> Iterator[Serving]:
    """Run an aggregator until the block has ended and watchers and workers have learned how the run ended.

    For an interrupted run, watchers see the connection break, since the run has not ended.

    Workers learn that the run is over only after the block has ended well. If it fails, even after the last
    round, a restarted aggregator retries, and it needs the workers to evaluate once more.

    Parameters
    ----------
    listen
        ``host:port``.
    protection, audit
        Access rules, and the audit log.
    incarnation
        Id of this process's incarnation.
    grace_s
        Seconds to wait for watchers.
    say
        Shows the user a line, e.g. that clients have no worker.
    lingers, resumed
        Whether to wait for external workers that lost their connection, and whether the run is a resumed one.
    presence
        Record of connected clients, for an open federation.
    monitor
        Receives activity outside the rounds as well.
    control
        Operations that an operator may request.
    models
        Serves models of the last durable round.
    health
        ``host:port`` for health probes.
    metrics
        ``host:port`` for Prometheus.
    stay
        Blocks after the block has ended well, until the process is told to exit. Meanwhile watchers see that the run
        has finished, and workers stay connected. None: exit at once.

    Raises
    ------
    ExperimentError
        If the port is taken or the address cannot be bound.
    """
    e, monitor = parts.experiment, monitor or Monitor()
    monitor.know(parts.manifest.clients)
    monitor.enter("waiting", "waiting for workers")
    notices = ProgressPublisher(e.name, e.federation.rounds or 0, len(parts.manifest.clients))
    run = ServedRun(
        name=e.name,
        incarnation=incarnation,
        experiment=assemble.welcome(parts),
        algorithm=parts.algorithm.name,
        version=parts.algorithm.version,
        vocabulary={**vocabulary(parts.algorithm), **({} if presence is None else VOCABULARY)},
        dtype=assemble.DTYPE,
        clients=[entry.id for entry in parts.manifest.clients],
        roster=parts.manifest.roster,
        presence=presence,
        classes=parts.manifest.classes,
    )
    server = Aggregator(
        run,
        protection=protection,
        audit=audit,
        monitor=monitor,
        notices=notices,
        control=control,
        models=models,
        say=say,
        health=health,
    )
    address = server.start(listen)
    try:

        def told() -> Iterator[Any]:
            load = None if models is None else models.load
            return federation_families(server.activity(), load, certificate_end(protection))

        with metrics_served(metrics, told):
            yield Serving(server, notices, address)
            if stay is not None:
                notices.tell("finished")
                monitor.enter("finished")
                stay()
            server.dismiss(finished=True)
            notices.tell("finished")
            monitor.enter("finished")
            notices.read_within(grace_s)
            if lingers:
                server.linger(resumed)
    except (InterruptedRun, KeyboardInterrupt):
        raise
    except BaseException as error:
        notices.tell("failed", str(error) or type(error).__name__)
        monitor.enter("failed", str(error) or type(error).__name__)
        notices.read_within(grace_s)
        raise
    finally:
        server.stop()


@contextmanager
def with_workers(
    at: Serving,
    parts: RunContext,
    workers: partial[Workers] | None,
    stop_request: StopRequest,
    wait_s: float,
    orphan_after_s: float | None,
) -> Iterator[None]:
    """Set up workers for training: the run's own, or external ones.

    The run's own workers leave at the end of the block. External ones stay until :func:`serving` ends, unless the
    block failed.

    Parameters
    ----------
    workers
        Starts the run's own workers; lacks the address and ``on_failure``. None: workers connect from elsewhere.
    wait_s
        Seconds until external workers must serve every client. The run's own are waited for while they live.
    orphan_after_s
        Seconds without a watcher after which the run stops; None: never.

    Raises
    ------
    QuorumError
        If clients are not served in time.
    WorkerLostError, DataError, ExperimentError, RefusedError
        The failure of the run's own workers, if they stopped the run.
    AbandonedError
        If the run stopped because nobody watches it.
    InterruptedRun
        If the run was stopped while waiting for workers.
    """

    def abort() -> None:
        stop_request.event.set()
        at.server.dismiss()

    stop_request.abort = abort
    own = None if workers is None else workers(address=at.address, on_failure=abort)
    finished = False
    try:
        with stop_request.when_unwatched(lambda: at.notices.unwatched_s, orphan_after_s):
            at.notices.tell("waiting", "waiting for workers")
            count = parts.experiment.runtime.workers if own is not None else 1
            if parts.manifest.clients:  # in an open federation, the roster waits
                # Our own workers may take as long as they live: one that is lost for good aborts the wait.
                within_s = wait_s if own is None else threading.TIMEOUT_MAX
                at.server.wait_for([entry.id for entry in parts.manifest.clients], within_s, workers=count)
            stop_request.training = True
            at.notices.tell("training")
            yield
        finished = True
    except BaseException as error:
        # The loop only sees that everything was lost; the worker's failure is the cause.
        if own is not None and own.failure is not None:
            raise own.failure from error
        if stop_request.reason is not None and isinstance(error, InterruptedRun | QuorumError):
            raise stop_request.reason from error
        if stop_request.event.is_set() and isinstance(error, QuorumError):
            raise InterruptedRun(f"stopped while waiting for workers; go on with {argument('resume')}") from error
        raise
    finally:
        if own is not None:
            own.dismiss()
        if own is not None or not finished:
            at.server.dismiss(finished)
        if own is not None:
            own.stop()
