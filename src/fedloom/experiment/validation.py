"""Validation of a mapping, from a file or an aggregator, into an :class:`Experiment`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from fedloom.algorithms.base import available
from fedloom.data.local import LOCAL
from fedloom.errors import ExperimentError
from fedloom.experiment.cross_checks import check_compatibility
from fedloom.experiment.schema import json_schema
from fedloom.experiment.sections import Experiment, Runtime
from fedloom.experiment.validation_errors import SET, KeyPath, Mistake, dotted, explain, listing, shown
from fedloom.models.factories import check_sent_factory
from fedloom.words import DEEPEST, parsed_json


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
        mistakes = explain(error, schema, value)
        left = [m for m in mistakes if m.path[:1] == ("algorithm",) and m.text.startswith("unknown key")]
        renamed = origins.get(("algorithm", "name")) == SET and any(origins.get(m.path) != SET for m in left)
        # The file's other keys belong to the method that it names.
        hint = f"{SET}'algorithm={{name: {name}}}' replaces the whole section" if renamed else None
        raise _refusal(source, mistakes, origins, hint) from None
    found = check_compatibility(experiment) if combined else []
    if found:
        raise _refusal(source, found, origins)
    return experiment


def _refusal(
    source: str, mistakes: Sequence[Mistake], origins: Mapping[KeyPath, str], hint: str | None = None
) -> ExperimentError:
    """Return the error that lists mistakes; a single one gives it its key."""
    key = dotted(mistakes[0].path) if len(mistakes) == 1 else None
    return ExperimentError(listing(source, mistakes, origins), hint=hint, key=key)


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
        raise ExperimentError(f"{source}: not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("data"), dict):
        raise ExperimentError(f"{source}: found {shown(value)}; allowed: a mapping with the key data")
    if "own" not in value["data"]:
        value["data"]["root"] = root
    model = value.get("model")
    if isinstance(model, dict) and isinstance(model.get("factory"), str):
        check_sent_factory(model["factory"])
    value["runtime"] = (runtime or Runtime()).model_dump(mode="json")
    # A local data set is on the aggregator's machine, which has checked the combinations.
    return validated(value, source, {}, combined=value["data"].get("dataset") not in LOCAL)
