"""Space of a hyperparameter search: its file, and its parameters, which are keys of an experiment.

``fedloom search`` and ``fedloom pipeline search`` read the same file.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from fedloom.core.home import expanded
from fedloom.core.settings import Settings
from fedloom.core.words import first_of, shortened
from fedloom.errors import ExperimentError
from fedloom.experiment.loading import plain_value
from fedloom.experiment.validation_errors import KeyPath, explain, listing
from fedloom.experiment.yaml_reader import as_yaml, parse_yaml
from fedloom.storage.folder import read_file

if TYPE_CHECKING:
    from fedloom.experiment.sections import Experiment

MOST_CORNERS = 64
"""Maximum combinations of extreme values that are checked; in a larger space, one parameter varies at a time."""

LARGEST_GRID = 10_000
"""Maximum combinations of a grid, and maximum values of a range that are listed."""

INCOMPARABLE = ("name", "seed", "data", "evaluation", "runtime", "storage", "tracking")
"""Sections and keys that cannot be searched: validation values on other data or with another seed are not comparable,
and the other keys change no model."""

SEARCHABLE = "data.augment"
"""Key of an incomparable section that may be searched, because it changes only training examples."""

Make = Callable[[Sequence[str]], "Experiment"]
"""Function of ``key=value`` overrides that returns the experiment with them; raises ExperimentError."""


class Range(Settings):
    """Range of numbers, ends included."""

    min: int | float = Field(description="Lowest value.")
    max: int | float = Field(description="Highest value.")
    step: int | float | None = Field(
        default=None, description="Distance between the values; null: any value, or 1 if the key takes only integers."
    )
    log: bool = Field(default=False, description="Draw the logarithm uniformly, as is usual for learning rates.")

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min >= self.max:
            raise ValueError(f"max: must be above min, {self.min} (got {self.max})")
        if self.log and self.min <= 0:
            raise ValueError(f"min: must be above 0 with log (got {self.min})")
        if self.log and self.step is not None:
            raise ValueError(f"step: cannot be combined with log (got {self.step})")
        if self.step is not None and not 0 < self.step <= self.max - self.min:
            raise ValueError(f"step: must be above 0 and at most max - min, {self.max - self.min} (got {self.step})")
        return self


class Choices(Settings):
    """List of values of any kind, sections included."""

    choices: list[Any] = Field(min_length=1, description="The values.")

    @model_validator(mode="after")
    def _differ(self) -> Self:
        texts = [as_yaml(value) for value in self.choices]
        if (twice := next((text for text in texts if texts.count(text) > 1), None)) is not None:
            raise ValueError(f"choices: must differ (got {twice} twice)")
        return self


def _kind(value: Any) -> str:
    chosen = isinstance(value, Choices) or (isinstance(value, Mapping) and "choices" in value)
    return "of_choices" if chosen else "of_range"


Values = Annotated[Annotated[Range, Tag("of_range")] | Annotated[Choices, Tag("of_choices")], Discriminator(_kind)]


class SearchSpace(Settings):
    """Search space, and how it is searched."""

    parameters: dict[str, Values] = Field(
        min_length=1,
        description="Values by dotted key of the experiment: `{min: A, max: B}` with `log: true` or `step: S`, or "
        "`{choices: [...]}`.",
    )
    sampler: Literal["tpe", "random", "grid"] = Field(
        default="tpe",
        description="How values are drawn: guided by earlier trials (tpe: tree-structured Parzen estimator), at "
        "random, or all combinations.",
    )
    trials: int | None = Field(
        default=None, ge=1, description="Number of trials; null: 20, or with grid all combinations."
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of the sampler.")
    early_stopping: Literal["median", "hyperband"] | None = Field(
        default=None,
        description="Stop a trial after an evaluation if its validation value is worse than the median of completed "
        "trials, or outside the best third (hyperband). Null: stop none.",
    )
    epsilon: float | None = Field(
        default=None,
        gt=0,
        description="Largest ε of a trial's training, set as its federation.privacy.budget: a trial ends before the "
        "round that would exceed it. Null: the experiment's own budget.",
    )


@dataclass(frozen=True)
class Parameter:
    """Parameter of a search.

    Attributes
    ----------
    key
        Dotted key of the experiment.
    low, high, step, log
        Range of numbers; ``step`` is None for any value between.
    whole
        True if the values are integers.
    choices
        Values as YAML texts, in place of a range; None for a range.
    """

    key: str
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    choices: tuple[str, ...] | None = None

    def text(self, value: Any) -> str:
        """Return a value as it stands after ``key=`` in an override: a number as Python writes it, or the choice."""
        return str(value) if self.choices is not None else repr(int(value) if self.whole else float(value))

    @property
    def grid(self) -> list[Any]:
        """Values of a grid, in ascending order or as listed.

        Raise ExperimentError for a logarithmic range, one of numbers without a step, and one of too many values.
        """
        if self.choices is not None:
            return list(self.choices)
        if self.log:
            raise ExperimentError(
                f"parameters.{self.key} has log, and sampler grid needs values at equal steps; give choices.",
                key=f"parameters.{self.key}.log",
            )
        if self.step is None and not self.whole:
            raise ExperimentError(
                f"parameters.{self.key} has no step, which sampler grid needs; set it, or give choices.",
                key=f"parameters.{self.key}.step",
            )
        # In decimals 0.1 + 2 · 0.1 is 0.3, so that the end is among the values.
        low, high, step = (Decimal(repr(number)) for number in (self.low, self.high, self.step or 1))
        size = int((high - low) / step) + 1
        if size > LARGEST_GRID:
            raise ExperimentError(
                f"parameters.{self.key} has {size:,} values, and at most {LARGEST_GRID:,} can be listed; raise step, "
                "or leave it out and set sampler to random.",
                key=f"parameters.{self.key}.step",
                found=self.step,
            )
        if self.whole:
            return list(range(int(self.low), int(self.high) + 1, int(step)))
        return [float(low + i * step) for i in range(size)]

    @property
    def corners(self) -> list[str]:
        """Texts of the extreme values; all choices."""
        return list(self.choices) if self.choices is not None else [self.text(self.low), self.text(self.high)]


@dataclass(frozen=True)
class SearchPlan:
    """Checked search of an experiment.

    Attributes
    ----------
    space
        The file's settings; ``trials`` and ``seed`` as asked for.
    parameters
        Searched keys with their values, in the order of the file.
    trials
        Number of trials.
    fixed
        Overrides of every trial, in addition to its parameters.
    """

    space: SearchSpace
    parameters: tuple[Parameter, ...]
    trials: int
    fixed: tuple[str, ...] = ()

    def overrides(self, texts: Mapping[str, str]) -> list[str]:
        """Return the overrides of a trial, given its values as texts."""
        return [*self.fixed, *(f"{key}={text}" for key, text in texts.items())]


def read_space(where: str | Path | Mapping[str, Any] | SearchSpace, *, trials: int | None = None) -> SearchSpace:
    """Read a search space from a YAML file or a mapping.

    Parameters
    ----------
    trials
        Number of trials in place of the file's; None: the file's.

    Raises
    ------
    ExperimentError
        If it cannot be read, or a key or value is not allowed; lists every error with its line.
    """
    origins: dict[KeyPath, str] = {}
    if isinstance(where, SearchSpace | Mapping):
        source = "the search space"
        value = plain_value(where if isinstance(where, SearchSpace) else dict(where), source)
    else:
        source = str(where)
        try:
            text = read_file(expanded(where)).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = (getattr(error, "strerror", None) or "not a UTF-8 text file").lower()
            raise ExperimentError(f"{source} cannot be read: {why}", key="space") from error
        value, origins = parse_yaml(text, source)
    if not isinstance(value, dict):
        raise ExperimentError(
            f"{source} must be a mapping with the key parameters (got {shortened(str(value))}).", key="space"
        )
    value = {**value, **({} if trials is None else {"trials": trials})}
    try:
        return SearchSpace.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        errors = explain(error, SearchSpace.model_json_schema(), value)
        raise ExperimentError(listing(source, errors, origins), key="space") from None


def plan_search(space: SearchSpace, make: Make) -> SearchPlan:
    """Check a space against its experiment, at its extreme values, and return the search.

    Raises
    ------
    ExperimentError
        If a key is unknown or cannot be searched, the experiment refuses a value, or the number of trials is wrong.
    """
    for key in space.parameters:
        _check_key(key)
    base, fixed = make([]), _fixed(space)
    if fixed and base.federation.privacy is None:
        raise ExperimentError(
            "epsilon limits the ε of private training, and the experiment's training is not private; set "
            "federation.privacy in it, or leave epsilon out.",
            key="epsilon",
        )
    _check_early_stopping(space, base)
    parameters = tuple(_parameter(key, values, make) for key, values in space.parameters.items())
    trials = _trials(space, parameters)
    for texts in _corners(parameters):
        settings = [f"{key}={text}" for key, text in texts.items()]
        try:
            make([*fixed, *settings])
        except ExperimentError as error:
            raise ExperimentError(f"at {', '.join(settings)}: {error}", key=error.key) from error
    return SearchPlan(space, parameters, trials, fixed)


def _check_key(key: str) -> None:
    if not all(step.strip() for step in key.split(".")):
        raise ExperimentError(f"parameters.{key!r} is not a dotted key, such as algorithm.local.lr.", key="parameters")
    inside = key == SEARCHABLE or key.startswith(f"{SEARCHABLE}.")
    if key.partition(".")[0] in INCOMPARABLE and not inside:
        raise ExperimentError(
            f"parameters.{key} cannot be searched: all trials are compared on the same validation data with the same "
            "seed, and keys such as name change no model. Change it in the experiment, or compare values in a sweep.",
            key=f"parameters.{key}",
        )


def _fixed(space: SearchSpace) -> tuple[str, ...]:
    budget = "federation.privacy.budget"
    if space.epsilon is None:
        return ()
    if budget in space.parameters:
        raise ExperimentError(
            f"parameters.{budget} cannot be combined with epsilon, which sets it.", key=f"parameters.{budget}"
        )
    return (f"{budget}={space.epsilon!r}",)


def _check_early_stopping(space: SearchSpace, base: Experiment) -> None:
    rounds, every = base.federation.rounds, base.evaluation.every
    if space.early_stopping is None or (rounds is not None and every < rounds):
        if space.early_stopping == "hyperband" and "federation.rounds" in space.parameters:
            raise ExperimentError(
                "parameters.federation.rounds cannot be combined with early_stopping: hyperband, which chooses the "
                "rounds itself.",
                key="parameters.federation.rounds",
            )
        return
    raise ExperimentError(
        f"early_stopping needs evaluations between rounds, but there are none: evaluation.every is {every}, and "
        f"federation.rounds {rounds}; lower evaluation.every.",
        key="early_stopping",
    )


def _parameter(key: str, values: Range | Choices, make: Make) -> Parameter:
    if isinstance(values, Choices):
        return Parameter(key, choices=tuple(as_yaml(value) for value in values.choices))
    whole = all(isinstance(end, int) for end in (values.min, values.max, values.step or 0))
    whole = whole and not (values.step is None and _takes_fractions(key, values, make))
    return Parameter(key, values.min, values.max, values.step, values.log, whole)


def _takes_fractions(key: str, values: Range, make: Make) -> bool:
    """Return whether a key accepts fractions, given a range whose ends are whole numbers."""
    inside = math.floor((values.min + values.max) / 2)
    try:
        make([f"{key}={inside + 0.5}"])
    except ExperimentError:
        return False
    return True


def _trials(space: SearchSpace, parameters: Sequence[Parameter]) -> int:
    if space.sampler != "grid":
        return 20 if space.trials is None else space.trials
    size = math.prod(len(parameter.grid) for parameter in parameters)
    if size > LARGEST_GRID:
        raise ExperimentError(
            f"The grid has {size:,} combinations; the limit is {LARGEST_GRID:,}. Raise step, or set sampler to random.",
            key="sampler",
        )
    if space.trials not in (None, size):
        raise ExperimentError(
            f"trials must be {size} with sampler grid, which tries all combinations of "
            f"{first_of([parameter.key for parameter in parameters], 5)}, or left out (got {space.trials}).",
            key="trials",
            found=space.trials,
        )
    return size


def _corners(parameters: Sequence[Parameter]) -> Iterator[dict[str, str]]:
    keys, corners = [parameter.key for parameter in parameters], [parameter.corners for parameter in parameters]
    if math.prod(map(len, corners)) <= MOST_CORNERS:
        for texts in itertools.product(*corners):
            yield dict(zip(keys, texts, strict=True))
        return
    first = {key: tried[0] for key, tried in zip(keys, corners, strict=True)}
    for key, tried in zip(keys, corners, strict=True):
        yield from (first | {key: text} for text in tried)
