"""Section ``algorithm`` of an experiment file: a method's name, and settings of the class that the method defines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from fedloom.algorithms.base import available, find_algorithm
from fedloom.core.settings import Settings


class AlgorithmChoice(Settings):
    """Name of a method, and its settings."""

    name: str
    settings: Settings


def _named(value: Any, allowed: Sequence[str]) -> str:
    """Return the ``name`` key of a section, checked.

    Raises
    ------
    ValidationError
        If it is absent or not among those allowed; pydantic merges it into the errors of the whole file.
    """
    if not isinstance(value, dict):
        raise PydanticCustomError("mapping", "must be a mapping with a name")
    if value.get("name") in allowed:
        return str(value["name"])
    kind = PydanticCustomError("unknown_name", "must be one of {allowed}", {"allowed": ", ".join(allowed)})
    detail = InitErrorDetails(type=kind if "name" in value else "missing", loc=("name",), input=value.get("name"))
    raise ValidationError.from_exception_data("name", [detail])


def _strictly(settings: type[BaseModel], value: Mapping[str, Any]) -> Any:
    # Through JSON, where strict validation still accepts a list for a tuple.
    return settings.model_validate_json(json.dumps(value), strict=True)


def _choose_algorithm(value: Any) -> AlgorithmChoice:
    if isinstance(value, AlgorithmChoice):
        return value
    name = _named(value, available())
    keys = {key: item for key, item in value.items() if key != "name"}
    return AlgorithmChoice(name=name, settings=_strictly(find_algorithm(name).settings, keys))


def _dump_algorithm(choice: AlgorithmChoice) -> dict[str, Any]:
    return {"name": choice.name, **choice.settings.model_dump(mode="json")}


AlgorithmSection = Annotated[AlgorithmChoice, PlainValidator(_choose_algorithm), PlainSerializer(_dump_algorithm)]
"""Type of the section: the name and the settings in one mapping."""
