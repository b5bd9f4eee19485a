"""JSON schema of an experiment file."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model

from fedloom.algorithms.base import available, find_algorithm
from fedloom.experiment.sections import Experiment


def json_schema(algorithms: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the JSON schema of an experiment file, for editors and documentation.

    Parameters
    ----------
    algorithms
        Names of the methods whose settings may stand under ``algorithm``; default: all registered methods.
    """
    return copy.deepcopy(_schema(tuple(available() if algorithms is None else algorithms)))


@functools.cache
def _schema(algorithms: tuple[str, ...]) -> dict[str, Any]:
    choices: list[Any] = [_settings_with_name(name) for name in algorithms]
    described = Field(description=Experiment.model_fields["algorithm"].description)
    fields: dict[str, Any] = {"algorithm": (functools.reduce(operator.or_, choices), described)}
    whole = create_model("Experiment", __base__=Experiment, **fields)
    schema = whole.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


@functools.cache
def _settings_with_name(name: str) -> type[BaseModel]:
    settings = find_algorithm(name).settings
    fields: dict[str, Any] = {"name": (Literal[name], Field(description="Which method."))}
    return create_model(settings.__name__, __base__=settings, **fields)
