"""Validation of a mapping, from a file or an aggregator, into an :class:`Experiment`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedloom.algorithms.base import available
from fedloom.core.words import DEEPEST, parsed_json
from fedloom.data.local import LOCAL
from fedloom.errors import ExperimentError
from fedloom.experiment.cross_checks import check_compatibility
from fedloom.experiment.loading import named_code
from fedloom.experiment.schema import json_schema
from fedloom.experiment.sections import Experiment, Runtime
from fedloom.experiment.validation_errors import SET, KeyPath, abbreviated, dotted, explain, listing
from fedloom.models.factories import check_sent_factory


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


def from_shared_json(text: str, *, root: str | None = None, runtime: Runtime | None = None) -> Experiment:
    """Complete an experiment sent by an aggregator with the worker's own settings.

    Parameters
    ----------
    text
        From :meth:`shared_json`.
    root
        ``data.root`` of this machine.
    runtime
        ``runtime`` of this machine.

    Raises
    ------
    ExperimentError
        If this version of FedLoom cannot run the experiment.
    """
    source = "experiment sent by the aggregator"
    try:
        value = parsed_json(text, DEEPEST)
    except ValueError as error:
        raise ExperimentError(f"{source} is not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("data"), dict):
        raise ExperimentError(f"{source} must be a mapping with the key data (got {abbreviated(value)})")
    if "own" not in value["data"]:
        value["data"]["root"] = root
    for path, name in named_code(value):
        check_sent_factory(name, dotted(path))
    value["runtime"] = (runtime or Runtime()).model_dump(mode="json")
    # A local data set is on the aggregator's machine, which has checked the combinations.
    return validated(value, source, {}, combined=value["data"].get("dataset") not in LOCAL)
