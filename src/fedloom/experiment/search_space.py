"""Grids of settings, ``key=v1,v2,...``, and spaces of hyperparameter searches, whose parameters are keys."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from fedloom.core.files import read_file
from fedloom.core.home import expanded
from fedloom.core.settings import Settings
from fedloom.core.words import first_of, shortened, shortest_suffixes
from fedloom.errors import ExperimentError, argument
from fedloom.experiment.loading import of, plain_value
from fedloom.experiment.validation_errors import KeyPath, validate
from fedloom.experiment.yaml_reader import as_yaml, parse_yaml

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
    is_choice = isinstance(value, Choices) or (isinstance(value, Mapping) and "choices" in value)
    return "of_choices" if is_choice else "of_range"


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
    """Parameter of a search, by the dotted ``key`` of the experiment: a range of numbers, or ``choices``.

    ``step`` is None for any number between; ``whole`` if the values are integers. ``choices`` are YAML texts, None for
    a range.
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
        name = f"parameters.{self.key}"
        if self.log:
            raise ExperimentError(
                f"{name} has log, and sampler grid needs values at equal steps; give choices.", key=f"{name}.log"
            )
        if self.step is None and not self.whole:
            raise ExperimentError(
                f"{name} has no step, which sampler grid needs; set it, or give choices.", key=f"{name}.step"
            )
        # In decimals 0.1 + 2 · 0.1 is 0.3, so that the end is among the values.
        low, high, step = (Decimal(repr(number)) for number in (self.low, self.high, self.step or 1))
        size = int((high - low) / step) + 1
        if size > LARGEST_GRID:
            raise ExperimentError(
                f"{name} has {size:,} values, and at most {LARGEST_GRID:,} can be listed; raise step, or leave it out "
                "and set sampler to random.",
                key=f"{name}.step",
                found=self.step,
            )
        return [int(low + i * step) if self.whole else float(low + i * step) for i in range(size)]


@dataclass(frozen=True)
class SearchPlan:
    """Checked search of an experiment: ``parameters`` in the order of the file, ``fixed`` overrides of every trial."""

    space: SearchSpace
    parameters: tuple[Parameter, ...]
    trials: int
    fixed: tuple[str, ...] = ()

    def overrides(self, texts: Mapping[str, str]) -> list[str]:
        """Return the overrides of a trial, given its values as texts."""
        return [*self.fixed, *(f"{key}={text}" for key, text in texts.items())]


def read_space(source: str | Path | Mapping[str, Any] | SearchSpace, *, trials: int | None = None) -> SearchSpace:
    """Read a search space from a YAML file or a mapping; ``trials`` replaces the file's number of trials.

    Raise ExperimentError if it cannot be read, or a key or value is not allowed; it lists every error with its line.
    """
    origins: dict[KeyPath, str] = {}
    if isinstance(source, SearchSpace | Mapping):
        name = "the search space"
        value = plain_value(source if isinstance(source, SearchSpace) else dict(source), name)
    else:
        name = str(source)
        try:
            text = read_file(expanded(source)).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = (getattr(error, "strerror", None) or "not a UTF-8 text file").lower()
            raise ExperimentError(f"{name} cannot be read: {reason}", key="space") from error
        value, origins = parse_yaml(text, name)
    if not isinstance(value, dict):
        raise ExperimentError(
            f"{name} must be a mapping with the key parameters (got {shortened(str(value))}).", key="space"
        )
    return validate(SearchSpace, value if trials is None else {**value, "trials": trials}, name, origins, key="space")


def plan_search(space: SearchSpace, make: Make) -> SearchPlan:
    """Check a space against its experiment, at its extreme values, and return the search.

    Raises
    ------
    ExperimentError
        If a key is unknown or cannot be searched, the experiment refuses a value, or the number of trials is wrong.
    """
    for key in space.parameters:
        _check_key(key)
    base, budget = make([]), "federation.privacy.budget"
    fixed = () if space.epsilon is None else (f"{budget}={space.epsilon!r}",)
    if fixed and budget in space.parameters:
        raise ExperimentError(
            f"parameters.{budget} cannot be combined with epsilon, which sets it.", key=f"parameters.{budget}"
        )
    if fixed and base.federation.privacy is None:
        raise ExperimentError(
            "epsilon limits the ε of private training, and the experiment's training is not private; set "
            "federation.privacy in it, or leave epsilon out.",
            key="epsilon",
        )
    _check_early_stopping(space, base)
    parameters = tuple(_parameter(key, values, make) for key, values in space.parameters.items())
    trials = _trials(space, parameters)
    for settings in _corners(parameters):
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
    if whole and values.step is None:  # unless the key takes fractions
        with suppress(ExperimentError):
            make([f"{key}={math.floor((values.min + values.max) / 2) + 0.5}"])
            whole = False
    return Parameter(key, values.min, values.max, values.step, values.log, whole)


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


def _corners(parameters: Sequence[Parameter]) -> Iterator[list[str]]:
    """Yield overrides with the extreme values, or choices, of all parameters; of many, one at a time varies."""
    corners = [
        [f"{each.key}={text}" for text in each.choices or (each.text(each.low), each.text(each.high))]
        for each in parameters
    ]
    if math.prod(map(len, corners)) <= MOST_CORNERS:
        yield from map(list, itertools.product(*corners))
        return
    first = [settings[0] for settings in corners]
    for i, settings in enumerate(corners):
        yield from ([*first[:i], setting, *first[i + 1 :]] for setting in settings)


LONGEST_NAME = 120
"""Maximum length of a run folder's name, in characters."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its folder's name, its overrides, and the resulting experiment."""

    name: str
    overrides: tuple[str, ...]
    experiment: Experiment


def grid_values(text: str) -> tuple[str, list[str]]:
    """Return the dotted key of one axis of a grid, ``key=v1,v2,...``, and each value as YAML on one line.

    Commas inside brackets, braces and quotes do not separate values. Raise ExperimentError if the text is malformed, or
    a value occurs twice.
    """
    key, equals, values = text.partition("=")
    axis = f"{argument('grid')} {shortened(text)}"
    if not equals or not all(step.strip() for step in key.split(".")):
        raise ExperimentError(
            f"{argument('grid')} must be KEY=VALUE,VALUE,..., such as algorithm.local.lr=0.01,0.03 (got "
            f"{shortened(text)}).",
            key="grid",
        )
    parsed, _ = parse_yaml(f"[{values}]", axis)
    if not isinstance(parsed, list) or not parsed:
        raise ExperimentError(f"{axis} has no value.", key="grid")
    texts = [as_yaml(value) for value in parsed]
    if twice := [value for value in texts if texts.count(value) > 1]:
        raise ExperimentError(f"{axis} has the value {twice[0]} twice.", key="grid")
    return key.strip(), texts


def points(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    overrides: Sequence[str],
    seeds: str | None,
    grid: Sequence[str],
    *,
    stored: Path | None = None,
) -> list[Point]:
    """Return every run of a sweep, with the seeds of one setting next to each other.

    Raise ExperimentError if the grid is malformed, or an experiment in it is invalid.

    Parameters
    ----------
    experiment, overrides
        As for :func:`~fedloom.experiment.of`.
    seeds
        ``1,2,3`` or ``1-3``; None keeps the experiment's.
    grid
        ``key=v1,v2`` each; the runs are their product.
    stored
        Folder of one of the runs, if the sweep is resumed; as for :func:`~fedloom.experiment.of`.
    """
    axes = _axes(grid, seeds)
    labels = shortest_suffixes([key for key, _ in axes])
    runs: list[Point] = []
    for values in itertools.product(*(values for _, values in axes)):
        settings = [f"{key}={value}" for (key, _), value in zip(axes, values, strict=True)]
        try:
            point = of(experiment, [*overrides, *settings], stored=stored)
        except ExperimentError as error:
            raise ExperimentError(f"at {', '.join(settings)}: {error}") from error
        name = _folder_name([f"{label}={_short(value)}" for label, value in zip(labels, values, strict=True)], settings)
        runs.append(Point(name, (*overrides, *settings), point))
    return runs


def _axes(grid: Sequence[str], seeds: str | None) -> list[tuple[str, list[str]]]:
    """Return the keys of a sweep with their values, seeds last."""
    axes = [grid_values(text) for text in grid]
    keys = [key for key, _ in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ExperimentError(f"{argument('grid')} names {key} twice; give all its values at once.", key="grid")
    if seeds is None:
        return axes
    if "seed" in keys:
        raise ExperimentError(f"{argument('grid')} of seed cannot be combined with {argument('seeds')}.", key="grid")
    return [*axes, ("seed", [str(seed) for seed in seeds_of(seeds)])]


def begun_in(folder: Path | None) -> Path | None:
    """Return the folder of a run inside a sweep's folder; None if there is none."""
    return None if folder is None else next((file.parent for file in sorted(folder.glob("*/experiment.yaml"))), None)


def seeds_of(text: str) -> list[int]:
    """Return the seeds listed as ``1,2,3`` or ``1-3``; raise ExperimentError if one occurs twice, or none."""
    seeds: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if span is None:
            raise ExperimentError(
                f"{argument('seeds')} must be numbers separated by commas, such as 1,2,3 or 1-3 (got {text!r}).",
                key="seeds",
                found=text,
            )
        seeds += range(int(span[1]), int(span[2] or span[1]) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        message = f"{argument('seeds')} must be at least one seed, each once (got {text!r})."
        raise ExperimentError(message, key="seeds", found=text)
    return seeds


def _short(value: str) -> str:
    """Return a YAML value as part of a folder name; for a mapping, its ``name`` or ``scheme``."""
    parsed, _ = parse_yaml(value, argument("grid"))
    name = (parsed.get("name") or parsed.get("scheme")) if isinstance(parsed, dict) else None
    return f"{{{name}}}" if name else value


def _folder_name(parts: Sequence[str], settings: Sequence[str]) -> str:
    """Return a folder name made from the settings, with a hash of them if it cannot show them exactly."""
    plain = ",".join(parts)
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", plain)
    if name == plain and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"
