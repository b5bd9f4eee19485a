"""Engine of a run: checks, components and steps shared by closed, open, replayed and finished runs.

A kind of run is one function over this engine (:mod:`~fedloom.engine.run_experiment`).
Nothing is written before
:meth:`Engine.make_folder`, so that a run that cannot begin leaves no trace.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.core.logs import lines_about
from fedloom.core.memory import imports_frozen
from fedloom.core.plugins import capability
from fedloom.engine import loops, results
from fedloom.engine.assemble import RunContext, fingerprint, make_parts, use_device
from fedloom.engine.constants import check_run_constants, write_constants
from fedloom.engine.distributed import Serving, ServingSettings, serving
from fedloom.engine.log_file import log_kept
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions, ServingOptions
from fedloom.engine.publication import Publication
from fedloom.engine.resume import check_folder, check_partition, check_replay, check_states, finished
from fedloom.engine.run_data import has_normalization, known_normalization, open_manifest, own_of, run_dataset
from fedloom.engine.stop_request import StopRequest
from fedloom.engine.tracking import TRACK, Tracker, TrackerObserver, find_trackers
from fedloom.engine.training_privacy import has_secret_noise, with_noise
from fedloom.errors import DataError, ExperimentError
from fedloom.evaluation.plan import EvaluationResult
from fedloom.experiment import Experiment
from fedloom.federation.evaluator import LoopHooks
from fedloom.federation.loop import Loop
from fedloom.federation.monitor import CONTROL, Control, Monitor
from fedloom.federation.roster import AvailableClients, Roster
from fedloom.federation.transport import Transport
from fedloom.runs.files import AGGREGATOR_LOG
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Replay
from fedloom.security.audit import Audit
from fedloom.security.options import Protection, ServerOptions
from fedloom.security.tokens import make_token
from fedloom.transport.control_service import ProgressPublisher
from fedloom.transport.personalization import Personalization

log = logging.getLogger("fedloom.run")


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes
    ----------
    folder
        Folder with all results (docs/evaluation.md).
    summary
        Content of ``summary.json``.
    report
        Path or URL of the report; None if there is none.
    """

    folder: Path
    summary: dict[str, Any]
    report: str | None


class Engine:
    """Engine of one run. The constructor makes all checks that need no folder.

    Attributes
    ----------
    is_open
        True for an aggregator whose clients bring their own data, and may join and leave.
    listens
        True if workers connect from elsewhere; otherwise the run starts its own, or none.
    dataset
        Data of the clients; None in an open federation.
    parts
        Server and client algorithms, model and settings.
    finished
        Summary of the run if it has completed its rounds before, once the engine is :meth:`opened`.
    replay
        Journal to repeat.
    """

    def __init__(self, experiment: Experiment, options: RunOptions, observer: RunObserver) -> None:
        self.started_at = time.perf_counter()
        self.experiment = e = experiment
        self.options = options
        self.folder = run_folder(e, options)
        trackers = trackers_of(e)
        self.observer = TrackerObserver(observer, trackers, self.folder.path)
        if options.watcher is not None:
            self.observer.add(options.watcher)
        self.own = own_of(e)
        self.listens = options.serving is not None
        self.is_open = self.own is not None and self.listens
        self._resumes = check_folder(self.folder, e, options.resume, is_open=self.is_open)
        # The run's own workers authenticate with a secret token, external workers as the options say.
        self.token = make_token()
        self._protection = Protection(
            ServerOptions(token=self.token) if options.serving is None else options.serving.protection
        )
        self._audit = Audit()
        use_device("cpu" if self.listens else e.runtime.device, e.runtime.threads)
        self.replay = None if options.replay is None else _replay(options.replay)
        if self.replay is not None:
            check_replay(self.replay, self.own)
            if e.federation.rounds and not self.replay.is_open and not _has_budget(e):
                self.replay.attempt(e.federation.rounds)  # raise now, not at its end, if the journal is too short
        self.dataset = None if self.is_open else run_dataset(e, options)
        stored = self.folder.experiment() if self._resumes else None
        self.experiment = e = with_noise(e, None if self.dataset is None else self.dataset.manifest, stored)
        self.parts = self._parts()
        self.stateful = self.parts.client_algorithm().stateful
        self.publication = Publication(self.folder, e, options)
        if options.replay is not None:
            check_run_constants(RunFolder(options.replay), self.parts)
        self._check(self.folder)
        self.publication.connect()
        self._incarnation = uuid.uuid4().hex
        self.monitor = Monitor(e.name, e.algorithm.name, e.federation.rounds, self._incarnation)
        self.stop_request = StopRequest(self.observer, self.monitor)
        self._control = Control(self.monitor, self.stop_request.operator) if self.listens else None
        self._held = ExitStack()
        self._is_locked = False
        self._keep_log: Callable[[Path], None]
        self._earlier_s = 0.0  # training time of earlier processes
        self.finished: dict[str, Any] | None = None

    def _parts(self) -> RunContext:
        """Return the parts; those of an open federation have no clients, and the normalization only if it is known."""
        if self.dataset is not None:
            return make_parts(self.experiment, self.dataset.manifest)
        assert self.own is not None
        normalization = known_normalization(self.own, self.folder)
        return make_parts(self.experiment, open_manifest(self.experiment, self.own, normalization))

    def _check(self, folder: RunFolder, location: str | None = None) -> None:
        """Raise unless the run in a folder, published at ``location``, can be resumed here."""
        if check_folder(folder, self.experiment, self.options.resume, location, is_open=self.is_open):
            if self.dataset is not None:
                check_partition(folder, self.dataset)
            if self.stateful:
                check_states(folder, self.publication.url)
            check_run_constants(folder, self.parts)

    @property
    def place(self) -> str:
        """Location of the run to show to users; the folder in an aggregator's pod does not outlive the pod."""
        url = self.publication.url
        return url if url is not None and self.listens else str(self.folder.path)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Download a published run on resume, and notify observers of the start and the end of this one."""
        with self._held:
            self._keep_log = self._held.enter_context(log_kept(alone=True))
            if self.publication.url is not None and self.options.resume:
                self.hold_folder()  # before the published run is downloaded to it
            self._resumes = self.publication.restore(self._incarnation, self._check) or self._resumes
            self.finished = finished(self.folder, self.experiment) if self._resumes else None
            if self.is_open:
                self.parts = self._parts()  # the published run may have the normalization
            self._held.enter_context(lines_about(self.monitor.about))
            self.observer.started(self.experiment, len(self.parts.manifest.clients), self.place)
            self._held.callback(self.observer.ended)
            if self.options.resume and not self._resumes:
                self.observer.notice(f"nothing to resume at {self.place}: starting at round 0")
            yield

    def hold_folder(self) -> None:
        """Lock the run's folder against other processes, unless this process has already locked it."""
        if not self._is_locked:
            self._held.enter_context(self.folder.held())
            self._is_locked = True

    def make_folder(self) -> None:
        """Create the run's folder; all checks have passed by then."""
        self.hold_folder()
        folder, e, options = self.folder, self.experiment, self.options
        folder.make(e.located().resolved_yaml())
        self._keep_log(folder.path / AGGREGATOR_LOG)
        if not self.is_open or has_normalization(self.parts.manifest):
            folder.write("partition.json", self.parts.manifest.to_json())
        folder.write_json("environment.json", fingerprint(e))
        write_constants(folder, self.parts)
        if self.listens and self._protection.access is not None:
            self._audit.keep((options.serving and options.serving.audit) or folder.logs / "audit.jsonl")
        self.publication.note()
        if options.replay is not None and has_secret_noise(e, options.replay):
            self.observer.notice(
                "the noise on the sums of this run was secret; the replay repeats its cohorts, with noise from the seed"
            )
        if self._control is None:  # no operator could resume it, and starting it here implies resuming
            folder.remove(CONTROL)
            return
        self._control.keep(folder)
        if (pause := self._control.paused) is not None:
            self.observer.notice(f"paused by {pause.by}: continue with `fedloom federation resume`")

    @contextmanager
    def served(self, presence: AvailableClients | None = None) -> Iterator[Serving]:
        """Run the aggregator during the block, and report progress and the outcome to workers and watchers."""
        options = self.options.serving or ServingOptions(listen="127.0.0.1:0")
        settings = ServingSettings(
            options,
            protection=self._protection,
            audit=self._audit,
            incarnation=self._incarnation,
            drain=self.listens,
            resumed=self._resumes,
        )
        with serving(
            self.parts,
            settings,
            self.observer.notice,
            presence=presence,
            monitor=self.monitor,
            control=self._control,
            models=self._models(),
            stay=self.stop_request.wait if options.stay else None,
        ) as serving_now:
            self.observer.add(serving_now.notices)
            yield serving_now

    def _models(self) -> Personalization | None:
        """Return a service for models of the last durable round; None if no client from outside can ask for one."""
        service = capability("models") if self.listens else None
        return None if service is None else service(self.folder, self._audit, self.experiment.runtime.threads)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Publish the logs if the block fails, and stop it on a signal."""
        with self.publication.logs_kept(), self.stop_request.signals() if self.options.signals else nullcontext():
            yield

    def loop(
        self,
        parts: RunContext,
        transport: Transport,
        roster: Roster | None = None,
        upto: int | None = None,
        *,
        measure_last: bool = True,
    ) -> Loop:
        """Return the round loop over a transport, with the engine's hooks (:func:`loops.loop`)."""
        if self.replay is not None and upto is None and _has_budget(self.experiment):
            upto = self.replay.rounds  # a budget may have ended the run
        hooks = LoopHooks(
            self.observer,
            self.stop_request.event,
            after=self.publication.publish,
            monitor=self.monitor,
            control=self._control,
        )
        return loops.loop(
            parts,
            transport,
            self.folder,
            hooks,
            replay=self.replay,
            roster=roster,
            upto=upto,
            measure_last=measure_last,
            keep_release=self.publication.keep_release,
        )

    def resume(self, loop: Loop, notices: ProgressPublisher | None = None) -> None:
        """Return to the last durable round, if the run is resumed."""
        if not self._resumes:
            return
        loop.resume()
        self._earlier_s = loop.training_seconds()
        self.observer.resumed(loop.round)
        if notices is not None:
            notices.tell("training", f"resuming after round {loop.round}")

    def train(self, loop: Loop) -> EvaluationResult:
        """Run the rounds to their end and return the last evaluation."""
        with imports_frozen():
            log.info("ready to train after %.2f s", time.perf_counter() - self.started_at)
            return loop.run()

    def conclude(self, parts: RunContext, loop: Loop, final: EvaluationResult) -> RunResult:
        """Write and publish the results of a run whose rounds have ended."""
        self.publication.gather_releases()
        self.folder.remove("report.html")  # a report must match the summary beside it
        if not loop.roster.fixed:
            self.folder.write("partition.json", loop.manifest.to_json())
        seconds = self._earlier_s + time.perf_counter() - self.started_at
        summary = results.conclude(parts, loop, final, seconds)
        if self.options.report and self.dataset is not None:  # data of a simulation, none of whose clients is private
            write_examples = capability("examples")
            if write_examples is not None:
                write_examples(self.folder, parts.plan.task.target_kind, parts.plan.targets)
        is_reported = self.options.report and write_report_if_possible(self.folder, self.observer)
        self.folder.tidy()
        self.publication.finish()
        return self.result(summary, is_reported=is_reported)

    def result(self, summary: dict[str, Any], *, is_reported: bool) -> RunResult:
        """Return the result of the run."""
        return RunResult(self.folder.path, summary, f"{self.place}/report.html" if is_reported else None)


def run_folder(e: Experiment, options: RunOptions) -> RunFolder:
    """Return the folder of a run."""
    return RunFolder(options.out or e.runs / f"{e.name}-{e.algorithm.name}-seed{e.seed}")


def trackers_of(e: Experiment) -> dict[str, Tracker]:
    """Return the trackers of a run: the experiment's, and those of the environment."""
    return find_trackers(dict.fromkeys((*e.tracking, *os.environ.get(TRACK, "").split())))


def write_report_if_possible(folder: RunFolder, observer: RunObserver) -> bool:
    """Write the report; return whether there is one."""
    try:
        capability("report", "the report")(folder.path)
    except ExperimentError as error:  # a dependency is missing; the run is complete without a report
        observer.notice(f"no report: {error}")
        return False
    return True


def _has_budget(e: Experiment) -> bool:
    return e.federation.privacy is not None and e.federation.privacy.budget is not None


def _replay(run: Path) -> Replay:
    if not (run / "journal.jsonl").is_file():
        raise DataError(f"{run}: not a run's folder (no journal.jsonl)")
    return Replay(RunFolder(run))
