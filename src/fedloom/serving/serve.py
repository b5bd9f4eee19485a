"""Model service for a run, read from its folder or from where it is published."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.core.memory import keep_freed_memory
from fedloom.core.urls import is_url
from fedloom.data.problem import Problem, TrainedPrivately
from fedloom.engine import assemble
from fedloom.engine.assemble import RunContext
from fedloom.engine.constants import check_run_constants, digests_of_run
from fedloom.engine.metrics import certificate_end, metrics_served, serving_families
from fedloom.engine.trained import check_checkpoint
from fedloom.federation.served import About, ServedRound, served_round
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.files import SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.security.audit import Audit
from fedloom.security.options import Protection
from fedloom.serving.open_inference import OpenInference, inference_served, models_folder
from fedloom.serving.saved_models import ModelFolder
from fedloom.transport.personalization import ModelServerSettings, Personalization, serve_models

FOLLOW_INTERVAL_S = 1.0
"""Seconds between checks for a newer round."""


def about(parts: RunContext, folder: RunFolder | None = None) -> About:
    """Return the description of a run that a client needs to request a model.

    It states the privacy of the training if the run in ``folder`` has finished.
    """
    claim = None if folder is None else (folder.json_or_none(SUMMARY) or {}).get("training_privacy")
    e, problem = parts.experiment, problem_of(parts, claim)
    return About(e.name, parts.algorithm.name, parts.algorithm.version, e.shared_json(), problem.to_json())


def problem_of(parts: RunContext, claim: Mapping[str, Any] | None = None) -> Problem:
    """Return the problem of a run, with the claim of its training's privacy if it has finished."""
    spec = dataclasses.replace(parts.manifest.spec, targets=parts.setup.targets)
    guarantee = TrainedPrivately.from_summary(claim)
    return Problem(parts.manifest.dataset, spec, parts.setup.clients, digests_of_run(parts), guarantee)


class DurableRounds:
    """Checkpoint to serve from a run's folder, reread on each call (``transport.personalization.Load``).

    The experiment and the partition are read on first use. While there is no checkpoint, a call raises an error, or
    returns None if the object is ``patient``.
    """

    def __init__(self, folder: RunFolder, checkpoint: str = "last", *, patient: bool = False) -> None:
        self._folder = folder
        self._which = check_checkpoint(checkpoint)
        self._patient = patient
        self._checkpoints = Checkpoints(folder.checkpoints)
        self._parts: RunContext | None = None
        self._seen: list[int] | None = None

    @property
    def parts(self) -> RunContext:
        """Parts of the run for new clients; raise DataError if its experiment or partition is missing or damaged."""
        if self._parts is None:
            parts = assemble.make_parts(self._folder.experiment(), self._folder.manifest())
            check_run_constants(self._folder, parts)
            self._parts = assemble.for_newcomers(parts)
        return self._parts

    @property
    def about(self) -> About:
        """Description of the run that a client needs."""
        return about(self.parts, self._folder)

    def __call__(self, digest: str | None) -> ServedRound | None:
        """Return the round to serve instead of the one with this digest; None if there is no newer one.

        Raise DataError if the checkpoint does not exist or is damaged.
        """
        self._folder.refresh()
        rounds = self._checkpoints.rounds()
        if (rounds == self._seen and digest is not None) or (self._patient and not rounds):
            return None
        checkpoint = self._checkpoints.load(self._which)
        self._seen = rounds
        if checkpoint.digest == digest:
            return None
        parts = self.parts
        return served_round(self.about, parts.algorithm, parts.server_algorithm(), checkpoint)


def model_service(folder: RunFolder, audit: Audit, threads: int) -> Personalization:
    """Return an aggregator's service for models of the last durable round; it loads nothing before a request."""
    return Personalization(DurableRounds(folder, patient=True), audit=audit, lazy=True, threads=threads)


def waiting(run: str, seconds: float, stop: threading.Event, say: Callable[[str], None]) -> Callable[[float], bool]:
    """Return a function that waits for a run's first publication; it returns False after a timeout or on ``stop``.

    ``say`` receives one message when the wait begins.
    """
    end = time.monotonic() + seconds
    is_announced = False

    def wait(pause_s: float) -> bool:
        nonlocal is_announced
        remaining_s = end - time.monotonic()
        if remaining_s <= 0:
            return False
        if not is_announced:
            say(f"{run}: nothing is published yet; waiting")
            is_announced = True
        return not stop.wait(min(pause_s, remaining_s))

    return wait


def serve_run(
    run: str,
    listen: str,
    *,
    checkpoint: str = "last",
    follow: bool = False,
    settings: ModelServerSettings | None = None,
    protection: Protection | None = None,
    audit: Path | None = None,
    stop: threading.Event | None = None,
    started: Callable[[str], None] = lambda address: None,
    say: Callable[[str], None] = lambda text: None,
    health: str | None = None,
    metrics: str | None = None,
    rest: str | None = None,
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
    started, say
        Receive the address, and messages for the user.
    health, metrics
        ``host:port`` for health probes and for Prometheus; None: none.
    rest
        ``host:port`` for predictions of clients' saved models (:mod:`fedloom.serving.open_inference`); None: none.

    Raise DataError if there is no run or no such checkpoint, or it is damaged, or with ``rest`` there are no saved
    models; ExperimentError if the method has no model for new clients, or the address cannot be bound.
    """
    protection, audit_log = protection or Protection(), Audit()
    settings = settings or ModelServerSettings()
    stop = stop or threading.Event()
    folder = RunFolder.open(run, wait=waiting(run, settings.wait_s, stop, say))
    rounds = DurableRounds(folder, checkpoint)
    threads = rounds.parts.experiment.runtime.threads
    assemble.use_device("cpu", threads)
    follow_s = FOLLOW_INTERVAL_S if follow else None
    if protection.access is not None and (audit is not None or not is_url(run)):
        audit_log.keep(audit or folder.logs / "audit.jsonl")
    service = Personalization(rounds, settings, audit_log, follow_s=follow_s, threads=threads)
    keep_freed_memory()
    gc.freeze()  # imported objects are never garbage; scanning them takes a tenth of the CPU time of a model

    serving = threading.Event()

    def inference() -> OpenInference:
        model_folder = ModelFolder(
            models_folder(None if is_url(run) else folder.path, settings.models), settings.models_kept
        )
        name = settings.model_name or rounds.about.run
        return OpenInference(
            name, model_folder, settings, protection.access, audit_log, lambda: serving.is_set() and not stop.is_set()
        )

    def begun(address: str) -> None:
        serving.set()
        started(address)

    try:
        with (
            metrics_served(metrics, lambda: serving_families(service.load, certificate_end(protection))),
            inference_served(rest, inference, protection, lambda at: say(f"predictions of saved models at {at}")),
        ):
            asyncio.run(serve_models(service, listen, protection, audit_log, stop, settings, begun, say, health))
    finally:
        gc.unfreeze()
    return service.load.handed_out
