"""Loading of an experiment file with overrides into a validated :class:`Experiment`.

A file that cannot be read or is not YAML is rejected before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedloom.core.files import read_file
from fedloom.core.home import expanded
from fedloom.core.settings import Settings
from fedloom.core.urls import is_url
from fedloom.core.words import DEEPEST, parsed_json, shortened
from fedloom.errors import ExperimentError
from fedloom.experiment.validation_errors import SET, KeyPath, abbreviated, dotted, validate
from fedloom.experiment.yaml_reader import as_yaml, parse_yaml
from fedloom.models.factories import check_sent_factory, is_permitted, permit_factory
from fedloom.storage import open_store

if TYPE_CHECKING:
    from fedloom.experiment.sections import Experiment, Runtime

S = TypeVar("S", bound=Settings)

RECORDED = "experiment.yaml"
"""Name of the experiment file in a run's folder."""

Overrides = Sequence[str]
"""Overrides of the form ``data.partition.clients=20``: dotted key, then a YAML value."""


def load_experiment(path: str | Path, overrides: Overrides = (), *, stored: Path | None = None) -> Experiment:
    """Read an experiment file.

    A file given by the user of this process permits the factory that it names (:mod:`fedloom.models.factories`).
    A URL, or the file in a run's folder, permits nothing: others may have written it.

    Parameters
    ----------
    path
        The file: its path, or its URL, ``s3://bucket/prefix/name``.
    overrides
        ``key=value`` each: a dotted key, and a YAML value that replaces the one in the file.
    stored
        Folder of the run to resume. Where a relative path of ``data`` does not exist in the current folder, the path
        that the run recorded is used. None: no run is resumed.

    Raises
    ------
    ExperimentError
        If the file cannot be read, or a key or combination of keys is invalid.
    StorageError, RefusedError
        If the store of a URL fails or denies access.
    """
    text = _read(path)
    own = not is_url(path) and not _is_of_run(expanded(path))
    return parse_experiment(text, overrides, source=str(path), stored=stored, own=own)


def of_run(text: str, source: str) -> Experiment:
    """Return the experiment that a run has recorded, without permission to call the factory that it names.

    The run may be someone else's. Combinations of keys were checked when it started. They are checked again only if
    this calls no factory or a permitted one, opens no local data set (which may no longer exist), and needs no
    torchvision.

    Raises
    ------
    ExperimentError
        If anything in it is invalid; names the ``source``.
    """
    from fedloom.data.local import LOCAL
    from fedloom.experiment.validation import validated

    value, origins = _mapping(text, source)
    code, data = named_code(value), value.get("data")
    is_local = isinstance(data, dict) and data.get("dataset") in LOCAL
    augments = isinstance(data, dict) and bool(data.get("augment"))
    combined = not is_local and not augments and all(is_permitted(name) for _, name in code)
    return validated(value, source, origins, combined=combined)


def _read(path: str | Path) -> str:
    """Return the text of an experiment file; raises like :func:`load_experiment`."""
    try:
        if is_url(path):
            place, _, name = str(path).rpartition("/")
            content = open_store(place).read(name)
        else:
            content = read_file(expanded(path))
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{path} is not a UTF-8 text file (byte {error.start})") from error
    except OSError as error:
        raise ExperimentError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def parse_experiment(
    text: str,
    overrides: Overrides = (),
    *,
    source: str = "the experiment",
    stored: Path | None = None,
    own: bool = True,
) -> Experiment:
    """Parse the text of an experiment file, YAML or JSON; otherwise as :func:`load_experiment`.

    Parameters
    ----------
    source
        Name of the text in errors.
    own
        True if the user of this process supplied the text, which permits the factory that it names.
    """
    return _checked(*_mapping(text, source), overrides, source, stored, own=own)


def _mapping(text: str, source: str) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    value, origins = parse_yaml(text, source)
    if not isinstance(value, dict):
        raise ExperimentError(
            f"{source} must be a mapping with the keys name, data, model, ... (got {abbreviated(value)})"
        )
    return value, origins


def _checked(
    value: dict[str, Any],
    origins: dict[KeyPath, str],
    overrides: Overrides,
    source: str,
    stored: Path | None = None,
    *,
    own: bool = True,
) -> Experiment:
    for override in overrides:
        _set(value, origins, override)
    if stored is not None and (stored / RECORDED).is_file():
        _take_paths(value, stored / RECORDED)
    for path, name in named_code(value):
        if own or origins.get(path) == SET:
            permit_factory(name)
    from fedloom.experiment.validation import validated  # imports torch: after everything that may fail without it

    return validated(value, source, origins)


def _take_paths(value: dict[str, Any], recorded: Path) -> None:
    """Replace relative paths of ``data`` that do not exist in the current folder by those that a run recorded."""
    run, _ = _mapping(_read(recorded), str(recorded))
    new: Any = value.get("data")
    old: Any = run.get("data")
    for key, section in (("root", None), ("path", "source")):
        if section is not None:
            new, old = new.get(section), old.get(section)
        if not isinstance(new, dict) or not isinstance(old, dict):
            return
        path, old_path = new.get(key), old.get(key)
        if isinstance(path, str) and isinstance(old_path, str):
            place = expanded(path)
            new[key] = path if place.is_absolute() or place.exists() else old_path


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
    RefusedError
        If the experiment has keys that this version does not know.
    """
    from fedloom.data.local import LOCAL
    from fedloom.experiment.sections import Runtime as Defaults
    from fedloom.experiment.validation import validated

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
    value["runtime"] = (runtime or Defaults()).model_dump(mode="json")
    # A local data set is on the aggregator's machine, which has checked the combinations.
    return validated(value, source, {}, combined=value["data"].get("dataset") not in LOCAL, sent=True)


def of(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    overrides: Overrides = (),
    *,
    stored: Path | None = None,
    **keys: Any,
) -> Experiment:
    """Return the experiment described by a file, a mapping or an object, with some of its keys replaced.

    Parameters
    ----------
    experiment
        The path or URL of an experiment file; its content as a mapping, in which sections may be objects; or an
        experiment.
    overrides, stored
        As for :func:`load_experiment`.
    keys
        Further overrides by name, with two underscores for each dot: ``federation__rounds=10``.

    Raises
    ------
    ExperimentError
        If it cannot be read or is invalid; lists every error with its key.
    """
    replacements = [
        *overrides,
        *(f"{key.replace('__', '.')}={as_yaml(plain_value(value, key))}" for key, value in keys.items()),
    ]
    if isinstance(experiment, str | Path):
        return load_experiment(experiment, replacements, stored=stored)
    source = "the experiment"
    value = plain_value(experiment, source)
    if not isinstance(value, dict):
        raise ExperimentError(
            f"The experiment must be the path of a file, a mapping, or an Experiment (got a "
            f"{type(experiment).__name__})."
        )
    return _checked(value, {}, replacements, source, stored)


def settings_of(kind: type[S], overrides: Overrides, source: str, option: str = SET) -> S:
    """Return settings whose defaults are replaced by ``key=value`` overrides.

    Parameters
    ----------
    source
        Name of the settings in errors.
    option
        Option that holds the overrides, and a space.

    Raises
    ------
    ExperimentError
        If a key or value is not allowed; lists every error.
    """
    value: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    for override in overrides:
        _set(value, origins, override, option)
    return validate(kind, value, source, origins)


def plain_value(value: Any, name: str) -> Any:
    """Return part of an experiment, which may contain Python objects, in the form that YAML would hold.

    Parameters
    ----------
    name
        Name of the part in errors.

    Raises
    ------
    ExperimentError
        If it holds a value that a file cannot.
    """

    def of_object(value: Any) -> Any:
        if hasattr(value, "model_dump"):  # a section, or the settings of a component
            return value.model_dump(mode="json")
        if hasattr(value, "settings") and hasattr(value, "name"):  # a method and its settings
            return {"name": value.name, **value.settings.model_dump(mode="json")}
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "tolist"):  # numpy and torch numbers
            return value.tolist()
        if callable(value) or hasattr(value, "sums"):  # a metric
            from fedloom.tasks.own_metric import remember_metric  # imports torch

            return remember_metric(value)
        raise ExperimentError(
            f"{name}: a {type(value).__name__} cannot be part of an experiment; give sections and values that a file "
            "can hold."
        )

    try:
        return json.loads(json.dumps(value, default=of_object))
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{name}: {error}") from error


def named_code(value: Mapping[str, Any]) -> list[tuple[KeyPath, str]]:
    """Return keys and names of the code that an experiment names: the factory of its model, and metrics."""
    names: list[tuple[KeyPath, Any]] = []
    if isinstance(model := value.get("model"), dict):
        names.append((("model", "factory"), model.get("factory")))
    metrics = evaluation.get("metrics") if isinstance(evaluation := value.get("evaluation"), dict) else None
    if isinstance(metrics, list | tuple):
        names += [(("evaluation", "metrics"), name) for name in metrics if ":" in str(name)]
    return [(path, name) for path, name in names if isinstance(name, str)]


def _is_of_run(path: Path) -> bool:
    """Return True for the experiment file that a run has written to its folder."""
    run_files = ("partition.json", "journal.jsonl", "checkpoints")
    return path.name == "experiment.yaml" and any((path.parent / name).exists() for name in run_files)


def _set(value: dict[str, Any], origins: dict[KeyPath, str], override: str, option: str = SET) -> None:
    """Apply one ``key=value`` override."""
    key, equals, text = override.partition("=")
    path = tuple(step.strip() for step in key.split("."))
    if not equals or not all(path):
        raise ExperimentError(f"{option}{shortened(override)} must be KEY=VALUE, such as federation.rounds=10.")
    new, inside = parse_yaml(text, f"{option}{shortened(override)}")
    target = value
    for depth, step in enumerate(path[:-1], start=1):
        if target.get(step) is None:
            target[step] = {}
            origins[path[:depth]] = option
        target = target[step]
        if not isinstance(target, dict):
            raise ExperimentError(
                f"{option}{shortened(override)}: {dotted(path[:depth])} is {abbreviated(target)}, which has no keys"
            )
    target[path[-1]] = new
    for old in [p for p in origins if p[: len(path)] == path]:
        del origins[old]
    origins.update({(*path, *p): option for p in inside} | {path: option})
