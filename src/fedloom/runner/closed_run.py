"""Run with a fixed set of clients, from a partition or from packed folders."""

from __future__ import annotations

from functools import partial

from fedloom.runner import assemble
from fedloom.runner.distributed import Serving, with_workers
from fedloom.runner.engine import Engine, RunResult
from fedloom.runner.options import WorkerOptions
from fedloom.runner.worker_processes import Workers
from fedloom.transport.address import dialable


def run_closed(engine: Engine) -> RunResult:
    """Train the clients in this process, in the run's own worker processes, or in external workers."""
    if not engine.listens and engine.experiment.runtime.workers == 0:
        return _in_process(engine)
    with engine.served() as at:
        engine.make_folder()
        if engine.listens:
            workers = None
            _announce(engine, at)
        else:
            workers = _own_workers(engine)
        with engine.guarded(), with_workers(at, engine.parts, workers, engine.stop_request, engine.options.serving):
            loop = engine.loop(engine.parts, at.server)
            engine.resume(loop, at.notices)
            final = engine.train(loop)
        return engine.conclude(engine.parts, loop, final)


def _in_process(engine: Engine) -> RunResult:
    assert engine.dataset is not None
    engine.make_folder()
    transport = assemble.in_process(engine.parts, engine.dataset, engine.folder)
    with engine.guarded():
        engine.stop_request.training = True
        loop = engine.loop(engine.parts, transport)
        engine.resume(loop)
        final = engine.train(loop)
    return engine.conclude(engine.parts, loop, final)


def _announce(engine: Engine, at: Serving) -> None:
    """Show the user how external workers can connect to the run."""
    assert engine.dataset is not None
    states = assemble.states_of(engine.folder) if engine.stateful and engine.publication.url is not None else None
    where = engine.options.partition or str(engine.dataset.folder)
    engine.observer.waiting_for_workers(dialable(at.address), where, states)


def _own_workers(engine: Engine) -> partial[Workers]:
    """Return a function that starts the run's own workers; it lacks the address and ``on_failure``."""
    assert engine.dataset is not None
    e, options, runtime = engine.experiment, engine.options, engine.experiment.runtime
    brought = bool(options.packed or options.observe)
    worker = WorkerOptions(
        None if brought else options.partition or str(engine.dataset.folder),
        options.packed,
        options.observe,
        settings=tuple(f"runtime.{key}={getattr(runtime, key)}" for key in ("device", "threads", "clients_at_once")),
        states=assemble.states_of(engine.folder),
    )
    return partial(Workers, runtime.workers, worker, engine.folder.logs, engine.token, e.code)
