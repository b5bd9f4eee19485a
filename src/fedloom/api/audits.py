"""Audits of runs and experiments: ``fedloom.audit``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedloom.api.calls import folders, observer_of, with_module
from fedloom.api.run import Run
from fedloom.core.home import expanded
from fedloom.errors import ExperimentError

if TYPE_CHECKING:
    from fedloom.engine.observer import RunObserver
    from fedloom.experiment import Experiment


def audit(
    what: Run | Experiment | Mapping[str, Any] | str | Path,
    /,
    *,
    canaries: int | None = None,
    of: Literal["clients", "examples"] = "clients",
    norm: float | None = None,
    seed: int | None = None,
    checkpoint: Literal["last", "best"] | int = "last",
    packed: str | Path | Iterable[str | Path] = (),
    out: str | Path | None = None,
    partition: str | Path | None = None,
    report: bool = True,
    progress: bool | RunObserver = True,
    **overrides: Any,
) -> Run:
    """Attack a finished run, or run an experiment with canaries and guess which of them took part.

    Without ``canaries``, membership inference distinguishes training from test examples by the losses of the run's
    models. Everything happens in this process, on the run's own data (docs/audit.md).

    Parameters
    ----------
    what
        A finished run, or its folder or URL; with ``canaries`` an experiment, as in :func:`run`.
    canaries
        Number of canaries, each in or out of training by a fair coin; None: attack a run.
    of
        With ``canaries``: clients whose update is a random direction, or training examples whose gradient is one; if
        the run does not protect examples, with a wrong target instead.
    norm
        Norm of the update of canary clients before it is clipped; None: ten times the clipping norm of
        ``federation.privacy``, or without it the norm of an honest update.
    seed
        Seed of the coins; None: drawn by the operating system.
    checkpoint
        As in :meth:`Run.models`.
    packed
        Folders of packed clients, for a run or an experiment with ``data.own``.
    out
        With ``canaries``, a new folder for partition, coins and run; None: ``runs/NAME-ALGORITHM-seedN-audit``.
    partition, report, progress, overrides
        With ``canaries``, as in :func:`run`.

    Returns
    -------
    Run
        The audited run; :attr:`Run.audit` has the results, and so does its report.

    Raises
    ------
    DataError
        If the run is not finished, or its data are missing.
    ExperimentError
        If an argument does not fit, or the experiment cannot have such canaries.
    """
    if canaries is None:
        _refuse("canaries", norm=norm, seed=seed, out=out, partition=partition, **overrides)
        if not isinstance(what, Run | str | Path):
            raise ExperimentError("Without canaries, an audit needs a run, not an experiment.", key="canaries")
        from fedloom.audits.run_audit import audit_run

        run = what if isinstance(what, Run) else Run(what)
        audit_run(run.folder, str(checkpoint), folders(packed))
        return run
    if isinstance(what, Run) or checkpoint != "last":
        raise ExperimentError("canaries needs an experiment, not a run.", key="canaries")
    from fedloom import experiment as experiments
    from fedloom.audits.canary_audit import CanaryOptions, audit_with_canaries

    folder, place = None if out is None else expanded(out), None if partition is None else str(partition)
    options = CanaryOptions(canaries, of, folder, place, norm, seed, report, folders(packed))
    e = experiments.of(what, **with_module(overrides))
    return Run(audit_with_canaries(e, options, observer_of(progress)))


def _refuse(requirement: str, **argument_given: Any) -> None:
    """Raise ExperimentError if an argument is given without what it needs."""
    if wrong := next((name for name, value in argument_given.items() if value is not None), None):
        raise ExperimentError(f"{wrong} needs {requirement}.", key=wrong)
