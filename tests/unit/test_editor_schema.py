"""JSON schema for editors: it accepts what FedLoom accepts, and reports one error once."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fedloom.algorithms.base import available, find_algorithm
from fedloom.errors import ExperimentError
from fedloom.experiment import parse_experiment
from fedloom.experiment.editor_schema import editor_schema
from fedloom.experiment.yaml_reader import parse_yaml

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("experiments/*.yaml"))

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"dataset": "fashion-mnist", "partition": {"scheme": "dirichlet", "clients": 10, "alpha": 0.5}},
    "task": {"name": "classification"},
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": {"name": "ditto", "local": {"steps": 1, "lr": 0.1, "schedule": {"name": "cosine", "rounds": 2}}},
    "federation": {"rounds": 2, "privacy": None},
}


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = editor_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def errors(validator: Draft202012Validator, value: Any) -> list[str]:
    """Return the messages of all innermost errors."""

    def inner(error: Any) -> list[str]:
        return [message for each in error.context for message in inner(each)] or [error.message]

    return [message for error in validator.iter_errors(value) for message in inner(error)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_experiment_files_name_the_schema_and_are_valid(path: Path, validator: Draft202012Validator) -> None:
    text = path.read_text()
    value, _ = parse_yaml(text, path.name)
    if "algorithm" not in value:
        pytest.skip("no experiment")
    first, _, _ = text.partition("\n")
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads((path.parent / named).read_text()) == editor_schema()
    assert errors(validator, value) == []


def test_every_method_is_accepted_and_its_typos_are_reported_once(validator: Draft202012Validator) -> None:
    for name in available():
        value = {**SMALL, "algorithm": {"name": name, **find_algorithm(name).example_settings()}}
        assert errors(validator, value) == [], name
        value["algorithm"]["lokal"] = {}
        (message,) = errors(validator, value)
        assert "lokal" in message


def put(value: dict[str, Any], path: str, new: Any) -> None:
    *above, last = path.split(".")
    for key in above:
        value = value[key]
    value[last] = new


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("algorithm.name", "dito"),
        ("algorithm.local.steps", "many"),
        ("algorithm.local.schedule.name", "cosin"),
        ("algorithm.local.schedule.stepp", 1),
        ("model.name", "mpl"),
        ("model.hiden", [1]),
        ("model.hidden", "8"),
        ("task.name", "classify"),
        ("task.smoothing", 0.1),
        ("data.partition.scheme", "dirichlett"),
        ("data.partition.alpha", -1),
        ("data.partition.shift", {"kind": "labels", "group": 2}),
        ("federation.privacy", {"of": "examples", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "noize": 1}),
        ("federation.round", 3),
        ("nam", "x"),
    ],
)
def test_one_error_is_one_message(validator: Draft202012Validator, path: str, value: Any) -> None:
    changed = copy.deepcopy(SMALL)
    assert errors(validator, changed) == []
    put(changed, path, value)
    with pytest.raises(ExperimentError):
        parse_experiment(json.dumps(changed))
    found = errors(validator, changed)
    assert len(found) == 1, found


CHANGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda e: e.pop("model"),
    lambda e: e["algorithm"].pop("name"),
    lambda e: e["data"].pop("partition"),
    lambda e: e["data"].update(own={"kind": "features", "input_shape": [2], "classes": ["a", "b"]}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_missing_and_contradicting_keys_are_reported(
    validator: Draft202012Validator, change: Callable[[dict[str, Any]], Any]
) -> None:
    changed = copy.deepcopy(SMALL)
    change(changed)
    assert errors(validator, changed)
