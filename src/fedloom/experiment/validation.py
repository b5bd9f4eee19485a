"""Validation of a mapping into an :class:`Experiment`, and the JSON schema of an experiment file."""

from __future__ import annotations

import copy
import functools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, create_model

from fedloom.algorithms.base import available, find_algorithm
from fedloom.errors import ExperimentError
from fedloom.experiment.cross_checks import check_compatibility
from fedloom.experiment.sections import Experiment
from fedloom.experiment.validation_errors import SET, KeyPath, dotted, explain, listing


def validated(
    value: dict[str, Any], source: str, origins: Mapping[KeyPath, str], *, combined: bool = True
) -> Experiment:
    """Return the experiment that a mapping describes.

    Parameters
    ----------
    value
        Content of a file, with overrides applied.
    source
        Name of the mapping in errors.
    origins
        Origin of each key.
    combined
        Also check for combinations that cannot run.

    Raises
    ------
    ExperimentError
        If a key or, with ``combined``, a combination of keys is invalid.
    """
    try:
        experiment = Experiment.model_validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        algorithm = value.get("algorithm")
        name = algorithm.get("name") if isinstance(algorithm, dict) else None
        schema = json_schema([name] if name in available() else None)
        errors = explain(error, schema, value)
        left = [m for m in errors if m.path[:1] == ("algorithm",) and m.text.startswith("unknown key")]
        renamed = origins.get(("algorithm", "name")) == SET and any(origins.get(m.path) != SET for m in left)
        # The file's other keys belong to the method that it names.
        hint = f"{SET}'algorithm={{name: {name}}}' replaces the whole section" if renamed else None
        raise ExperimentError(listing(source, errors, origins), hint=hint, key=dotted(errors[0].path)) from None
    found = check_compatibility(experiment) if combined else []
    if found:
        raise ExperimentError(listing(source, found, origins), key=dotted(found[0].path))
    return experiment


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
