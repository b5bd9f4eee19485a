"""Aggregator and worker processes of a distributed run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedloom.errors import FedloomError, InterruptedRun, QuorumError, argument
from fedloom.federation.control import Control
from fedloom.federation.loop import vocabulary
from fedloom.federation.measuring import VOCABULARY
from fedloom.federation.monitor import Monitor
from fedloom.federation.roster import AvailableClients
from fedloom.runner import assemble
from fedloom.runner.assemble import RunContext
from fedloom.runner.metrics import certificate_end, federation_families, metrics_served
from fedloom.runner.options import ServingOptions
from fedloom.runner.stop_request import StopRequest
from fedloom.runner.worker_processes import Workers
from fedloom.security.audit import Audit
from fedloom.security.options import Protection
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.control_service import ProgressPublisher
from fedloom.transport.personalization import Personalization
from fedloom.transport.served_run import ServedRun

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
    at: Serving,
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
        at.server.shutdown_workers()

    stop_request.abort = abort
    own = None if workers is None else workers(address=at.address, on_failure=abort)
    finished = False
    try:
        with stop_request.when_unwatched(
            lambda: at.notices.unwatched_s, None if options is None else options.orphan_after_s
        ):
            at.notices.tell("waiting", "waiting for workers")
            if parts.manifest.clients:  # in an open federation, the roster waits
                # There is no time limit for the run's own workers: one that is lost for good aborts the wait.
                within_s = threading.TIMEOUT_MAX if options is None else options.wait_s
                count = 1 if own is None else parts.experiment.runtime.workers
                at.server.wait_for([entry.id for entry in parts.manifest.clients], within_s, workers=count)
            stop_request.training = True
            at.notices.tell("training")
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
            at.server.shutdown_workers(finished)
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
