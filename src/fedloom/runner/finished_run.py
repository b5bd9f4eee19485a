"""Resumption of a run that has completed its rounds: missing results are added."""

from __future__ import annotations

from typing import Any

from fedloom.runner.engine import Engine, RunResult, write_report_if_possible
from fedloom.runs.checkpoint import Checkpoints


def run_finished(engine: Engine, summary: dict[str, Any]) -> RunResult:
    """Complete the report and publication of a finished run; an aggregator also announces the end to workers."""
    engine.hold_folder()
    _show(engine)
    if not engine.listens:
        return _complete(engine, summary)
    with engine.served() as at:
        # Workers may have missed the end.
        at.notices.tell("training", "finished before")
        return _complete(engine, summary)


def _show(engine: Engine) -> None:
    """Restore the status and metrics of the finished run."""
    made = Checkpoints(engine.folder.checkpoints)
    for durable in made.rounds()[-1:]:
        last = engine.folder.last_evaluation()
        engine.monitor.resume(durable, None if last is None else last[0], made.written_at(durable))


def _complete(engine: Engine, summary: dict[str, Any]) -> RunResult:
    engine.observer.notice(f"already finished, after round {engine.experiment.federation.rounds}")
    reported = (engine.folder.path / "report.html").exists()
    if engine.options.report and not (reported and engine.publication.is_whole):  # publishing includes the figures
        reported = write_report_if_possible(engine.folder, engine.observer)
    engine.publication.complete()
    return engine.result(summary, reported=reported)
