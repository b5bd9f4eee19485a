"""Round loops and evaluators of an experiment, from its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fedloom.engine.assemble import RunContext
from fedloom.engine.observer import RunObserver
from fedloom.engine.results import extra_metrics
from fedloom.engine.training_privacy import is_simulation, noisy_steps_of, private_sums_of, tally_of
from fedloom.experiment import Experiment
from fedloom.experiment.sections import EarlyStopping
from fedloom.federation.evaluator import AlgorithmPair, Evaluator, LoopConfig, LoopHooks
from fedloom.federation.loop import Loop
from fedloom.federation.private_sums import PrivateSums
from fedloom.federation.releases import Keep, Releases
from fedloom.federation.roster import Roster
from fedloom.federation.transport import Transport
from fedloom.runs.checkpoint import Best
from fedloom.runs.files import RELEASES
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Replay


def loop(
    parts: RunContext,
    transport: Transport,
    folder: RunFolder,
    hooks: LoopHooks,
    *,
    replay: Replay | None = None,
    roster: Roster | None = None,
    upto: int | None = None,
    measure_last: bool = True,
    keep_release: Keep | None = None,
) -> Loop:
    """Return the round loop of an experiment; it writes descriptors to ``descriptors.json`` in the run's folder.

    By default, the ``roster`` is the fixed set of the manifest's clients. A replay stops at the round ``upto`` (None:
    as the experiment says), and evaluates it if ``measure_last``. For a published run, ``keep_release`` stores a
    client's private release before it is sent.
    """
    roster = Roster(parts.manifest) if roster is None else roster
    promised = parts.algorithm.privacy(parts.settings)
    simulated = is_simulation(parts.experiment, transport)
    private = private_sums_of(parts.experiment, simulated=simulated)
    tally = tally_of(parts.experiment)
    counts = promised is not None or tally is not None or folder.has(RELEASES)
    config = _loop_config(parts.experiment, is_open=not roster.fixed)
    if upto is not None:
        config = dataclasses.replace(config, rounds=upto, enough=None, measure_last=measure_last)
    extra = extra_metrics(parts.experiment, roster, folder, keep=True)
    releases = Releases(folder, promised, keep_release, tally, repeatable=simulated) if counts else None
    return Loop(
        config,
        _algorithm_pair(parts, private),
        roster,
        transport,
        folder,
        hooks,
        extra,
        replay=replay,
        releases=releases,
    )


def evaluator(parts: RunContext, transport: Transport, folder: RunFolder) -> Evaluator:
    """Return an evaluator of a run's clients, which can also personalize; it does not write to the run's folder."""
    config = _loop_config(parts.experiment, is_open=False)
    return Evaluator(
        config, _algorithm_pair(parts), Roster(parts.manifest), transport, folder, LoopHooks(RunObserver())
    )


def _algorithm_pair(parts: RunContext, private: PrivateSums | None = None) -> AlgorithmPair:
    return AlgorithmPair(
        parts.algorithm,
        parts.server_algorithm(),
        parts.client_algorithm(),
        parts.plan,
        parts.summation,
        noisy_steps_of(parts.experiment),
        private,
    )


def _loop_config(e: Experiment, *, is_open: bool) -> LoopConfig:
    federation, evaluation = e.federation, e.evaluation
    return LoopConfig(
        rounds=federation.rounds,
        clients_per_round=federation.clients_per_round,
        deadline_s=federation.deadline_s,
        min_replies=federation.min_replies,
        attempts=federation.attempts,
        checkpoint_every_s=federation.checkpoint_every_s,
        evaluate_every=evaluation.every,
        evaluation_cohort=evaluation.cohort,
        label_mask=evaluation.label_mask,
        seed=e.seed,
        enough=_early_stopping(federation.until),
        own_steps=evaluation.own_steps or (),
        experiment=e.shared_json() if is_open else "",
    )


def _early_stopping(until: EarlyStopping | None) -> Callable[[int, Best], bool] | None:
    """Return a predicate of (round, best round) that ends an open federation; None without ``until``."""
    return None if until is None else lambda round, best: until.is_reached(round, best.round, best.score)
