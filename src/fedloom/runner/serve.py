"""Model service for a run, read from its folder or from where it is published."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom import experiment as experiments
from fedloom.data.manifest import Manifest
from fedloom.errors import DataError
from fedloom.federation.checkpoint import Checkpoints
from fedloom.federation.folder import RunFolder
from fedloom.federation.published import Published
from fedloom.federation.served import About, ServedRound, served_round
from fedloom.runner import assemble
from fedloom.runner.assemble import RunContext
from fedloom.runner.metrics import certificate_end, metrics_served, serving_families
from fedloom.runner.trained import check_checkpoint
from fedloom.storage import is_url, open_store
from fedloom.transport.personalization import Personalization, ServingLimits, serve_models
from fedloom.trust.audit import Audit
from fedloom.trust.options import Protection

POLL_INTERVAL_S = 1.0
"""Seconds between checks for a first publication."""


def about(parts: RunContext) -> About:
    """Return the description of a run that a client needs to request a model."""
    manifest = parts.manifest
    problem = {
        "dataset": manifest.dataset,
        "kind": manifest.kind,
        "input_shape": manifest.input_shape,
        "class_names": manifest.class_names,
        "normalization": vars(manifest.normalization),
        "clients": parts.task.clients,
    }
    e = parts.experiment
    return About(e.name, parts.algorithm.name, parts.algorithm.version, e.shared_json(), json.dumps(problem))


class DurableRounds:
    """Checkpoint to serve from a run's folder, reread on each call (``transport.personalization.Load``).

    Parameters
    ----------
    folder
        Folder of the run; its experiment and partition are read on first use.
    checkpoint
        ``last``, ``best`` or a round.
    refresh
        Called to update the folder before each read.
    patient
        Return None while there is no checkpoint, instead of raising.
    """

    def __init__(
        self,
        folder: RunFolder,
        checkpoint: str = "last",
        refresh: Callable[[], None] = lambda: None,
        *,
        patient: bool = False,
    ) -> None:
        self._folder = folder
        self._which = check_checkpoint(checkpoint)
        self._refresh = refresh
        self._patient = patient
        self._checkpoints = Checkpoints(folder.checkpoints)
        self._parts: RunContext | None = None
        self._seen: list[int] | None = None

    @property
    def parts(self) -> RunContext:
        """Parts of the run, for clients from outside it.

        Raises
        ------
        DataError
            If the experiment or the partition is missing or damaged.
        """
        if self._parts is None:
            e = experiments.of_run(self._folder.path)
            manifest = Manifest.from_json(
                self._folder.text("partition.json"), where=str(self._folder.path / "partition.json")
            )
            self._parts = assemble.for_newcomers(assemble.make_parts(e, manifest))
        return self._parts

    @property
    def about(self) -> About:
        """Description of the run that a client needs."""
        return about(self.parts)

    def __call__(self, digest: str | None) -> ServedRound | None:
        """Return the round to serve in place of the one with this digest; None if there is none newer.

        Raises
        ------
        DataError
            If the checkpoint does not exist or is damaged.
        """
        self._refresh()
        rounds = self._checkpoints.rounds()
        if (rounds == self._seen and digest is not None) or (self._patient and not rounds):
            return None
        found = self._checkpoints.load(self._which)
        self._seen = rounds
        if found.digest == digest:
            return None
        parts = self.parts
        return served_round(self.about, parts.algorithm, parts.server_half(), found)


def wait_nowhere(seconds: float) -> bool:
    """Return False at once, without waiting."""
    return False


def waiting(run: str, seconds: float, stop: threading.Event, say: Callable[[str], None]) -> Callable[[float], bool]:
    """Return a function that waits for a run's first publication; it returns False after a timeout or on ``stop``.

    Parameters
    ----------
    say
        Receives one message when the wait begins.
    """
    end = time.monotonic() + seconds
    told = False

    def wait(pause_s: float) -> bool:
        nonlocal told
        left = end - time.monotonic()
        if left <= 0:
            return False
        if not told:
            say(f"{run}: nothing is published there yet; waiting")
            told = True
        return not stop.wait(min(pause_s, left))

    return wait


@contextmanager
def run_folder(
    run: str, wait: Callable[[float], bool] = wait_nowhere
) -> Iterator[tuple[RunFolder, Callable[[], None]]]:
    """Yield a run's folder, and a function that updates it if the run is published elsewhere.

    Parameters
    ----------
    run
        Folder of the run, or the URL of a published run, which is copied to a temporary folder.
    wait
        Called with a number of seconds to wait while nothing is published; returns whether to check again.

    Raises
    ------
    DataError
        If there is no run, or it is damaged.
    StorageError, RefusedError
        If the store cannot be used.
    """
    if not is_url(run):
        yield RunFolder.open(run), lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="fedloom-serve-") as temporary:
        folder = RunFolder(Path(temporary))
        published = Published(folder, open_store(run), uuid.uuid4().hex)

        def refresh() -> None:
            if published.is_behind and not published.restore():
                raise DataError(f"{run}: found no published run there")

        while not published.restore() and wait(POLL_INTERVAL_S):
            pass
        refresh()
        yield folder, refresh


def serve(
    run: str,
    listen: str,
    *,
    checkpoint: str = "last",
    follow: bool = False,
    limits: ServingLimits | None = None,
    protection: Protection | None = None,
    audit: Path | None = None,
    drain_s: float = 10.0,
    stop: threading.Event | None = None,
    started: Callable[[str], None] = lambda address: None,
    say: Callable[[str], None] = lambda text: None,
    health: str | None = None,
    metrics: str | None = None,
    wait_s: float = 0.0,
) -> int:
    """Serve a run's models until stopped; return the number of models handed out.

    Parameters
    ----------
    run
        Folder of the run, or URL of a published run.
    listen
        ``host:port``; port 0 picks a free port.
    checkpoint
        ``last``, ``best`` or a round.
    follow
        Switch to each newer round once it is durable.
    audit
        Path of the audit log; None: in the logs of the run's folder, if that is local. No audit log is kept
        unless clients must authenticate.
    drain_s
        Seconds that open conversations may continue after a stop.
    started, say
        Receive the address, and messages for the user.
    health, metrics
        ``host:port`` for health probes and for Prometheus; None: none.
    wait_s
        Seconds to wait for a first publication at the URL.

    Raises
    ------
    DataError
        If there is no run or no such checkpoint, or it is damaged.
    ExperimentError
        If the method has no model for new clients, or the address cannot be bound.
    """
    protection, kept = protection or Protection(), Audit()
    limits = limits or ServingLimits()
    stop = stop or threading.Event()
    with run_folder(run, waiting(run, wait_s, stop, say)) as (folder, refresh):
        rounds = DurableRounds(folder, checkpoint, refresh)
        threads = rounds.parts.experiment.runtime.threads
        assemble.use_device("cpu", threads)
        limits = ServingLimits(**{**vars(limits), "threads": threads, "follow_s": limits.follow_s if follow else None})
        if protection.access is not None and (audit is not None or not is_url(run)):
            kept.keep(audit or folder.logs / "audit.jsonl")
        service = Personalization(rounds, limits, kept)
        with metrics_served(metrics, lambda: serving_families(service.load, certificate_end(protection))):
            asyncio.run(serve_models(service, listen, protection, kept, stop, drain_s, started, say, health))
        return service.handed_out
