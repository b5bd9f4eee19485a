"""Trials of a hyperparameter search: a study of Optuna, stored in the search's folder.

Each value is drawn by a sampler of its own, seeded by the trial's number and the key. A continued search draws
what an uninterrupted one would have drawn: everything else that a sampler uses is in the stored study.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedloom.core.keyed import make_rng
from fedloom.errors import DataError, ExperimentError, argument
from fedloom.experiment.search_space import Parameter, SearchPlan

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as StoredTrial

LOG = "search.log"
"""File of the stored study, in the search's folder."""

STARTUP = 5
"""Number of trials that must run to their end before the median stops others."""

REDUCTION = 3
"""Hyperband's reduction factor η: at each step, one of η trials continues."""

State = Literal["running", "done", "stopped", "failed"]

_STATES: Mapping[str, State] = {"RUNNING": "running", "COMPLETE": "done", "PRUNED": "stopped", "FAIL": "failed"}
"""States of a trial, by Optuna's names."""


@dataclass(frozen=True)
class Schedule:
    """Rounds and evaluations of a trial, which early stopping needs."""

    rounds: int | None
    every: int

    @property
    def warm_up(self) -> int:
        """Number of evaluations, a third of all, after which the median may stop a trial."""
        return max(1, math.ceil((self.rounds or 0) / self.every / 3))


@dataclass
class Trial:
    """One trial.

    Attributes
    ----------
    number
        Counted from 1.
    texts
        Its values as texts, by key.
    measured
        Score by evaluated round: the headline metric on validation data, or minus it if lower is better.
    behind
        True if early stopping decided to stop it at its last evaluation.
    state
        ``done`` after its last round, ``stopped`` early, or ``failed``.
    score
        Score of the last round, if it is done.
    epsilon
        ε of its training, if that is private and the trial is done.
    error
        Reason for a failure.
    """

    number: int
    texts: Mapping[str, str]
    measured: dict[int, float] = field(default_factory=dict)
    behind: bool = False
    state: State = "running"
    score: float | None = None
    epsilon: float | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"trial-{self.number:03d}"

    @property
    def label(self) -> str:
        """Name with its values, for people."""
        return f"{self.name} ({', '.join(f'{key}={text}' for key, text in self.texts.items())})"


class Trials:
    """Trials of a search; ``all`` has every trial so far.

    ``base`` is a digest of the experiment without the searched parameters. This process has locked the folder.

    Raise ExperimentError if Optuna is not installed, or the folder has a different search; DataError if the stored
    study is damaged.
    """

    def __init__(self, plan: SearchPlan, folder: Path, base: str, schedule: Schedule) -> None:
        import_optuna()
        self.plan = plan
        self._stored: dict[int, StoredTrial] = {}  # by number, of those that have not ended
        self._grid = _grid(plan) if plan.space.sampler == "grid" else None
        try:
            self._study = _stored_study(folder / LOG, _pruner(plan, schedule))
            self.all = [self._restored(frozen) for frozen in self._study.trials]
        except (ValueError, KeyError) as error:
            raise DataError(f"{folder / LOG} is damaged: {error}") from error
        settings = {"experiment": base, "space": plan.space.model_dump(mode="json", exclude={"trials"})}
        for key, value in settings.items():
            if self._study.user_attrs.get(key, value) != value:
                raise ExperimentError(
                    f"{argument('resume')}: {folder} holds another search: its {key} is different.",
                    hint=f"continue it as it was begun, or start a new search in another folder ({argument('out')})",
                    key="resume",
                )
            self._study.set_user_attr(key, value)

    @property
    def unfinished(self) -> list[Trial]:
        """Trials that were drawn and have not ended."""
        return [trial for trial in self.all if trial.state == "running"]

    def draw(self) -> Trial:
        """Return the next trial."""
        self._study.sampler = self._sampler(len(self.all), "")
        trial = self._drawn(self._study.ask())
        self.all.append(trial)
        return trial

    def measure(self, trial: Trial, round: int, score: float) -> None:
        """Record a score after a round, and whether the trial has fallen behind.

        A round that was recorded before, which a resumed run repeats, changes nothing.
        """
        if round in trial.measured:
            return
        stored_trial = self._stored[trial.number]
        stored_trial.report(score, round)
        trial.measured[round], trial.behind = (
            score,
            stored_trial.should_prune(),
        )  # Hyperband counts how often it is asked
        if trial.behind:
            stored_trial.set_user_attr("behind", True)

    def end(
        self,
        trial: Trial,
        state: State,
        *,
        score: float | None = None,
        epsilon: float | None = None,
        error: str | None = None,
    ) -> None:
        """Record the end of a trial."""
        from optuna.trial import TrialState

        trial.state, trial.score, trial.epsilon, trial.error = state, score, epsilon, error
        stored_trial = self._stored.pop(trial.number)
        for key, value in (("epsilon", epsilon), ("error", error)):
            if value is not None:
                stored_trial.set_user_attr(key, value)
        states = {"done": TrialState.COMPLETE, "stopped": TrialState.PRUNED, "failed": TrialState.FAIL}
        self._study.tell(stored_trial, score if state == "done" else None, state=states[state])

    def best(self) -> Trial | None:
        """Return the trial with the highest score among those done, within the bound on ε; the first of equals."""
        bound = self.plan.space.epsilon
        finished = [trial for trial in self.all if trial.state == "done" and trial.score is not None]
        affordable = [
            trial for trial in finished if bound is None or (trial.epsilon is not None and trial.epsilon <= bound)
        ]
        return max(affordable, key=lambda trial: trial.score or 0.0, default=None)

    def _sampler(self, number: int, key: str) -> BaseSampler:
        """Return the sampler that draws the value of a key in a trial, counted from 0."""
        from optuna.samplers import RandomSampler, TPESampler

        if self._grid is not None:
            return self._grid
        space = self.plan.space
        seed = int(make_rng(space.seed, "search", number, key).integers(2**32))
        return RandomSampler(seed=seed) if space.sampler == "random" else TPESampler(seed=seed, constant_liar=True)

    def _drawn(self, stored_trial: StoredTrial) -> Trial:
        """Return a trial with a value for every key; those that it has already stay."""
        texts = {}
        for parameter in self.plan.parameters:
            self._study.sampler = self._sampler(stored_trial.number, parameter.key)
            texts[parameter.key] = parameter.text(_suggested(stored_trial, parameter))
        self._stored[stored_trial.number + 1] = stored_trial
        return Trial(stored_trial.number + 1, texts)

    def _restored(self, frozen: FrozenTrial) -> Trial:
        if frozen.state.name == "RUNNING":
            from optuna.trial import Trial as StoredTrial

            trial = self._drawn(StoredTrial(self._study, frozen._trial_id))
            trial.measured, trial.behind = dict(frozen.intermediate_values), frozen.user_attrs.get("behind", False)
            return trial
        return Trial(
            frozen.number + 1,
            {parameter.key: parameter.text(frozen.params[parameter.key]) for parameter in self.plan.parameters},
            dict(frozen.intermediate_values),
            frozen.user_attrs.get("behind", False),
            _STATES[frozen.state.name],
            frozen.value if frozen.state.name == "COMPLETE" else None,
            frozen.user_attrs.get("epsilon"),
            frozen.user_attrs.get("error"),
        )


def _stored_study(path: Path, pruner: BasePruner) -> Study:
    """Open the study in a folder, or begin one."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)  # left by a killed process
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):  # the process was killed while it wrote the line
        path.write_bytes(content[: content.rfind(b"\n") + 1])
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(path))),
        pruner=pruner,
        direction="maximize",
        study_name="search",  # Hyperband assigns a trial to a bracket by this name and its number
        load_if_exists=True,
    )


def _suggested(stored_trial: StoredTrial, p: Parameter) -> Any:
    if p.choices is not None:
        return stored_trial.suggest_categorical(p.key, p.choices)
    if p.whole:
        return stored_trial.suggest_int(p.key, int(p.low), int(p.high), log=p.log, step=int(p.step or 1))
    return stored_trial.suggest_float(p.key, float(p.low), float(p.high), log=p.log, step=p.step)


def import_optuna() -> None:
    """Set up the package optuna; raise ExperimentError if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ExperimentError(
            "A search needs the package optuna, which is not installed.", hint="pip install 'fedloom[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _grid(plan: SearchPlan) -> BaseSampler:
    from optuna.samplers import GridSampler

    class Grid(GridSampler):
        """All combinations, in an order that the seed determines."""

        def after_trial(self, *args: Any) -> None:
            """Do nothing: the search counts its trials itself."""

    return Grid({parameter.key: parameter.grid for parameter in plan.parameters}, seed=plan.space.seed)


def _pruner(plan: SearchPlan, schedule: Schedule) -> BasePruner:
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    if plan.space.early_stopping == "median":
        return MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=schedule.warm_up * schedule.every)
    if plan.space.early_stopping == "hyperband":
        assert schedule.rounds is not None
        return HyperbandPruner(schedule.every, schedule.rounds, REDUCTION)
    return NopPruner()
