"""Trials of a hyperparameter search: Optuna's ask and tell, and the log from which a killed search continues.

The log has every trial that was asked for, every value that it measured, and its end. To continue a search, the log is
replayed to a new study with the same seed: asked in the same order, the sampler draws the same trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fedloom.errors import DataError, ExperimentError, argument
from fedloom.experiment.search_space import Parameter, SearchPlan
from fedloom.runs.files import RunFiles

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial as OptunaTrial

LOG = "search.jsonl"

STARTUP = 5
"""Number of trials that must run to their end before the median stops others."""

REDUCTION = 3
"""Hyperband's reduction factor η: at each step, one of η trials continues."""

State = Literal["running", "done", "stopped", "failed"]


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
        True if early stopping asked to stop it at its last evaluation.
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
    """Trials of a search, whose log is in its folder; ``all`` has every trial so far.

    ``base`` is a digest of the experiment without the searched parameters.

    Raise ExperimentError if Optuna is not installed, or the folder has a different search; DataError if the log is
    damaged.
    """

    def __init__(self, plan: SearchPlan, files: RunFiles, base: str, schedule: Schedule) -> None:
        optuna = import_optuna()
        self.plan, self.all = plan, list[Trial]()
        self._files = files
        self._space = {parameter.key: distribution(parameter) for parameter in plan.parameters}
        self._asked: dict[int, OptunaTrial] = {}
        self._study = optuna.create_study(
            sampler=_sampler(plan),
            pruner=_pruner(plan, schedule),
            direction="maximize",
            study_name="search",  # Hyperband assigns a trial to a bracket by this name and its number
        )
        space = plan.space.model_dump(mode="json", exclude={"trials"})
        self._repeat({"optuna": optuna.__version__, "experiment": base, "space": space})

    @property
    def unfinished(self) -> list[Trial]:
        """Trials that were asked for and have not ended."""
        return [trial for trial in self.all if trial.state == "running"]

    def ask(self) -> Trial:
        """Return the next trial."""
        trial = self._ask()
        self._files.append(LOG, {"event": "asked", "trial": trial.number, "parameters": trial.texts})
        return trial

    def measure(self, trial: Trial, round: int, score: float) -> None:
        """Record a score after a round, and whether the trial has fallen behind.

        A round that was recorded before, which a resumed run repeats, changes nothing.
        """
        if round not in trial.measured:
            self._measure(trial, round, score)
            line = {"event": "measured", "trial": trial.number, "round": round, "score": score}
            self._files.append(LOG, line)

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
        self._end(trial, state, score, epsilon, error)
        line = {"event": "ended", "trial": trial.number, "state": state, "score": score, "epsilon": epsilon}
        self._files.append(LOG, {**line, "error": error})
        self._files.sync(LOG)

    def best(self) -> Trial | None:
        """Return the trial with the highest score among those done, within the bound on ε; the first of equals."""
        bound = self.plan.space.epsilon
        done = [trial for trial in self.all if trial.state == "done" and trial.score is not None]
        within = [trial for trial in done if bound is None or (trial.epsilon is not None and trial.epsilon <= bound)]
        return max(within, key=lambda trial: trial.score or 0.0, default=None)

    def _ask(self) -> Trial:
        asked = self._study.ask(self._space)
        texts = {parameter.key: parameter.text(asked.params[parameter.key]) for parameter in self.plan.parameters}
        trial = Trial(asked.number + 1, texts)
        self._asked[trial.number] = asked
        self.all.append(trial)
        return trial

    def _measure(self, trial: Trial, round: int, score: float) -> None:
        trial.measured[round] = score
        self._asked[trial.number].report(score, round)
        trial.behind = self._asked[trial.number].should_prune()  # Hyperband counts how often it is asked

    def _end(self, trial: Trial, state: State, score: float | None, epsilon: float | None, error: str | None) -> None:
        from optuna.trial import TrialState

        trial.state, trial.score, trial.epsilon, trial.error = state, score, epsilon, error
        states = {"done": TrialState.COMPLETE, "stopped": TrialState.PRUNED, "failed": TrialState.FAIL}
        self._study.tell(self._asked[trial.number], score if state == "done" else None, state=states[state])

    def _repeat(self, about: dict[str, Any]) -> None:
        """Replay the log to the study; begin a log if there is none."""
        log, last = self._files.line_file(LOG), 0
        lines = list(log.forwards())
        for line in lines:
            if not line.whole:  # the process was killed while it wrote the line
                log.cut(line.start)
                break
            assert line.object is not None
            if last == 0:
                _check_same(line.object, about, self._files)
            else:
                self._replay(line.object)
            last = line.end
        if last == 0:
            self._files.append(LOG, about)

    def _replay(self, line: Mapping[str, Any]) -> None:
        match line:
            case {"event": "asked", "parameters": dict() as texts}:
                if (found := self._ask().texts) != texts:
                    raise ExperimentError(
                        f"{argument('resume')}: Optuna gives {found} where the search tried {texts}; continue on a "
                        "machine like the first one, or start a new search in another folder."
                    )
            case {"event": "measured", "trial": int(number), "round": int(round), "score": int() | float() as score}:
                self._measure(self.all[number - 1], round, score)
            case {"event": "ended", "trial": int(number), "state": "done" | "stopped" | "failed" as state}:
                self._end(self.all[number - 1], state, line.get("score"), line.get("epsilon"), line.get("error"))
            case _:
                raise DataError(f"{self._files.path / LOG} has a line that this version cannot read: {line}")


def distribution(parameter: Parameter) -> BaseDistribution:
    """Return Optuna's distribution of a parameter's values; Katib's is the same."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    p = parameter
    if p.choices is not None:
        return CategoricalDistribution(p.choices)
    if p.whole:
        return IntDistribution(int(p.low), int(p.high), log=p.log, step=int(p.step or 1))
    return FloatDistribution(float(p.low), float(p.high), log=p.log, step=p.step)


def import_optuna() -> Any:
    """Return the package optuna; raise ExperimentError if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ExperimentError(
            "A search needs the package optuna, which is not installed.", hint="pip install 'fedloom[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _sampler(plan: SearchPlan) -> BaseSampler:
    from optuna.samplers import GridSampler, RandomSampler, TPESampler

    class Grid(GridSampler):
        """All combinations, in an order that the seed determines."""

        def after_trial(self, *args: Any) -> None:
            """Do nothing: the search counts its trials itself."""

    seed = plan.space.seed
    if plan.space.sampler == "grid":
        return Grid({parameter.key: parameter.grid for parameter in plan.parameters}, seed=seed)
    return RandomSampler(seed=seed) if plan.space.sampler == "random" else TPESampler(seed=seed, constant_liar=True)


def _pruner(plan: SearchPlan, schedule: Schedule) -> BasePruner:
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    if plan.space.early_stopping == "median":
        return MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=schedule.warm_up * schedule.every)
    if plan.space.early_stopping == "hyperband":
        assert schedule.rounds is not None
        return HyperbandPruner(schedule.every, schedule.rounds, REDUCTION)
    return NopPruner()


def _check_same(begun: Mapping[str, Any], now: Mapping[str, Any], files: RunFiles) -> None:
    """Raise ExperimentError unless a search was begun with this space, experiment and version of Optuna."""
    hints: Mapping[str, Callable[[], str]] = {
        "space": lambda: "its search space is different",
        "experiment": lambda: "its experiment has other settings",
        "optuna": lambda: f"it was begun with Optuna {begun.get('optuna')}, and {now['optuna']} is installed",
    }
    for key, difference in hints.items():
        if begun.get(key) != now[key]:
            raise ExperimentError(
                f"{argument('resume')}: {files.path} holds another search: {difference()}.",
                hint=f"continue it as it was begun, or start a new search in another folder ({argument('out')})",
                key="resume",
            )
