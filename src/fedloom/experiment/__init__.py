"""The experiment file: read, checked and filled with its defaults. The only place that reads YAML.

``load`` turns a file and ``--set`` overrides into an :class:`Experiment`, or raises an ``ExperimentError`` that shows
every mistake on one screen. Sections are frozen pydantic models; the keys under ``model``, ``algorithm`` and
``data.partition`` belong to the model, method and scheme that their ``name`` (``scheme``) picks.
"""

from fedloom.experiment.grids import Point, grid_values, points, seeds_of
from fedloom.experiment.loading import from_shared_json, load, loads
from fedloom.experiment.schema import json_schema
from fedloom.experiment.sections import Experiment, Runtime
from fedloom.experiment.yaml_reader import as_yaml

__all__ = [
    "Experiment",
    "Point",
    "Runtime",
    "as_yaml",
    "from_shared_json",
    "grid_values",
    "json_schema",
    "load",
    "loads",
    "points",
    "seeds_of",
]
