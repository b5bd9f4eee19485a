"""Planning of a pipeline's experiments: validation and defaults before anything is fetched or started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from fedloom import experiment as experiments
from fedloom.errors import ExperimentError
from fedloom.experiment import Data, Experiment, OwnData


class Plan(NamedTuple):
    """Experiment, and the parts of it that other tasks need.

    Attributes
    ----------
    experiment
        The whole experiment, with every default, as JSON.
    data
        JSON of exactly what determines its partition: experiments with equal text share the partition.
    dataset, root
        The data set, and the folder for data sets (empty: the machine's default).
    """

    experiment: str
    data: str
    dataset: str
    root: str


def plan(experiment: str, overrides: Sequence[str] = ()) -> Plan:
    """Validate an experiment file's text (YAML or JSON), and return its plan.

    Raise ExperimentError if it cannot run; lists every error, each with its key. Overrides are those of ``--set``.
    """
    e = experiments.parse_experiment(experiment, overrides)
    return Plan(_as_json(e), _data_of(e), e.data.dataset, _dealt(e).root or "")


def grid(experiment: str, methods: Sequence[str], seeds: Sequence[float]) -> list[dict[str, str]]:
    """Return the runs of a comparison: every method with every seed.

    Raise ExperimentError if one of them cannot run, two are the same, or they use several data sets.

    Parameters
    ----------
    methods
        Changes of each method: ``key=value`` separated by semicolons; empty for the unchanged experiment.
    seeds
        Whole numbers; empty for the experiment's own.

    Returns
    -------
    list of dict
        ``label``, unique, and ``experiment`` and ``data`` as in :class:`Plan`.
    """
    seeds_chosen: list[int | None] = [*_whole(seeds)] or [None]
    points: dict[str, dict[str, str]] = {}
    for number, method in enumerate(methods or [""], start=1):
        for seed in seeds_chosen:
            e = _changed(experiment, method, seed)
            text = _as_json(e)
            if text in points:
                raise ExperimentError(
                    f"method {method!r} with seed {e.seed} is the same run as {points[text]['label']}; give each once",
                    key="methods",
                )
            label = f"{e.algorithm.name}-{number}-seed-{e.seed}"
            points[text] = {"label": label, "experiment": text, "data": _data_of(e)}
    datasets = sorted({json.loads(point["data"])["dataset"] for point in points.values()})
    if len(datasets) > 1:
        raise ExperimentError(f"methods must use one data set for all runs (got {', '.join(datasets)})", key="methods")
    return list(points.values())


def _whole(seeds: Sequence[float]) -> list[int]:
    """Return seeds as integers: Kubeflow passes the numbers of a list as doubles, exact up to 2**53."""
    wrong = [s for s in seeds if not isinstance(s, int | float) or not float(s).is_integer() or not 0 <= s <= 2**53]
    if wrong:
        raise ExperimentError(
            f"seeds must be whole numbers from 0 to {2**53} (got {wrong[0]!r}).",
            key="seeds",
            found=wrong[0],
        )
    return [int(seed) for seed in seeds]


def _changed(experiment: str, method: str, seed: int | None) -> Experiment:
    overrides = [part.strip() for part in method.split(";") if part.strip()]
    overrides += [] if seed is None else [f"seed={seed}"]
    try:
        return experiments.parse_experiment(experiment, overrides)
    except ExperimentError as error:
        raise ExperimentError(f"with {'; '.join(overrides) or 'no change'}: {error}") from error


def _dealt(e: Experiment) -> Data:
    if isinstance(e.data, OwnData):
        raise ExperimentError(
            "data.own: a pipeline partitions a data set; set data.dataset and data.partition", key="data.own"
        )
    if e.data.source is not None:
        raise ExperimentError(
            f"data.source: a pipeline runs elsewhere, without {e.data.source.path}; name a data set", key="data.source"
        )
    return e.data


def _as_json(e: Experiment) -> str:
    return json.dumps(e.model_dump(mode="json"), ensure_ascii=False)


def _data_of(e: Experiment) -> str:
    data = _dealt(e).model_dump(mode="json", exclude={"root", "source", "augment"})
    return json.dumps({"seed": e.seed, **data}, sort_keys=True)
