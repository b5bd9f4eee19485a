"""Experiment file: reading, validation and defaults. No other package reads YAML.

``load_experiment`` turns a file and ``--set`` overrides into an :class:`Experiment`, or raises an ``ExperimentError``
that shows every error on one screen. Sections are frozen pydantic models. The keys under ``model``, ``algorithm`` and
``data.partition`` belong to the model, method and scheme selected by their ``name`` (``scheme``). These modules import
torch, and are therefore imported on first use of one of their names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedloom.experiment.loading import from_shared_json, load_experiment, of, of_run, parse_experiment, settings_of
from fedloom.experiment.search_space import Point, begun_in, grid_values, points, seeds_of
from fedloom.experiment.yaml_reader import as_yaml

if TYPE_CHECKING:
    from fedloom.experiment.sections import Data, Experiment, OwnData, Runtime, WorkerSettings
    from fedloom.experiment.validation import json_schema

__all__ = [
    "Data",
    "Experiment",
    "OwnData",
    "Point",
    "Runtime",
    "WorkerSettings",
    "as_yaml",
    "begun_in",
    "from_shared_json",
    "grid_values",
    "json_schema",
    "load_experiment",
    "of",
    "of_run",
    "parse_experiment",
    "points",
    "seeds_of",
    "settings_of",
]

_LATER = {
    **dict.fromkeys(("Data", "Experiment", "OwnData", "Runtime", "WorkerSettings"), "sections"),
    "json_schema": "validation",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
