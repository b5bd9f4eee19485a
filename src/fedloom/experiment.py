"""The experiment file: read, checked and filled with its defaults. The only place that reads YAML.

``load`` turns a file and ``--set`` overrides into an :class:`Experiment`, or raises an ``ExperimentError`` that shows
every mistake on one screen. Sections are frozen pydantic models; the keys under ``model``, ``algorithm`` and
``data.partition`` belong to the model, method and scheme that their ``name`` (``scheme``) picks.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    create_model,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from fedloom import mistakes
from fedloom.algorithms.base import available, find
from fedloom.data.folders import data_root
from fedloom.data.schemes import MeansScheme, Scheme, unseen_count
from fedloom.data.sources import SOURCES
from fedloom.errors import ExperimentError
from fedloom.mistakes import Mistake, dotted, shown
from fedloom.models.registry import ModelSettings
from fedloom.settings import Settings
from fedloom.storage.open import is_url, s3_place

Overrides = Sequence[str]
"""Of the form ``data.partition.clients=20``: dotted key, then a YAML value."""


class Section(Settings):
    """Base of all sections; on top of :class:`Settings`, infinity and NaN are no numbers."""

    model_config = ConfigDict(allow_inf_nan=False)


def _known_dataset(name: str) -> str:
    if name not in SOURCES:
        raise PydanticCustomError("unknown_name", "one of {allowed}", {"allowed": ", ".join(sorted(SOURCES))})
    return name


def _folder(text: str) -> str:
    if "://" in text:
        raise ValueError(f"found {shown(text)}; allowed: a folder of this machine")
    return text


def _place(text: str) -> str:
    try:
        s3_place(text)
    except ExperimentError as error:
        raise ValueError(str(error)) from None
    return text


class Data(Section):
    """Which data, and how they are dealt out to clients."""

    dataset: Annotated[str, AfterValidator(_known_dataset)] = Field(
        description="Which data set.", json_schema_extra={"enum": [*sorted(SOURCES)]}
    )
    root: Annotated[str, AfterValidator(_folder)] | None = Field(
        default=None,
        min_length=1,
        description="Folder for data sets and partitions; null is $FEDLOOM_DATA, else ~/.cache/fedloom.",
    )
    partition: Scheme = Field(description="How the data are dealt out to clients.")
    unseen_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="Part of the clients that takes no part in training."
    )
    validation_fraction: float = Field(
        default=1 / 6, gt=0, lt=1, description="Part of the official training set that is kept for validation."
    )

    @property
    def folder(self) -> Path:
        """Where data sets and partitions lie on this machine."""
        return data_root(self.root)

    @property
    def seen(self) -> int | None:
        """Number of seen clients, the length of the roster; None where only the data say how many clients there are."""
        clients = self.partition.clients
        return None if clients is None else clients - unseen_count(clients, self.unseen_fraction)


class Federation(Section):
    """The rounds."""

    rounds: int = Field(ge=0, description="Training rounds; 0 for a method that does not train together.")
    clients_per_round: int = Field(default=5, ge=1, description="Seen clients in each round's cohort.")
    deadline_s: float = Field(
        default=600.0, gt=0, description="Seconds an exchange may take before a client counts as lost."
    )
    min_replies: int = Field(
        default=1, ge=1, description="Clients that must answer every exchange for a round to count."
    )
    attempts: int = Field(
        default=3, ge=1, description="Failed attempts at one round after which the run stops, resumable."
    )
    checkpoint_every_s: float = Field(
        default=30.0, ge=0, description="Seconds between checkpoints; 0 is after every round."
    )
    lost_state: Literal["refuse", "afresh"] = Field(
        default="refuse",
        description="A client whose state of earlier rounds is lost takes no part (refuse), or starts anew (afresh).",
    )


class Evaluation(Section):
    """When and how every client's own model is measured."""

    every: int = Field(
        default=50, ge=1, description="Rounds between evaluations; round 0 and the last are always evaluated."
    )
    label_mask: bool = Field(
        default=False, description="Report the reading in which labels a client never trains on are excluded."
    )
    cohort: int = Field(default=20, ge=1, description="Clients in one evaluation conversation.")
    batch_size: int = Field(default=512, ge=1, description="Examples in one forward pass of an evaluation.")


class Runtime(Section):
    """What this machine uses: processes, threads, device."""

    workers: int = Field(default=2, ge=0, description="Worker processes; 0 trains inside the aggregator's process.")
    threads: int = Field(default=1, ge=1, description="Torch threads of each process, the aggregator's included.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="What the workers compute on.")
    clients_at_once: int = Field(default=1, ge=1, description="Clients vectorized together on a GPU; 1 on the CPU.")


class AlgorithmChoice(Section):
    """A method by name, and its settings."""

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
        raise PydanticCustomError("mapping", "a mapping with a name")
    if value.get("name") in allowed:
        return str(value["name"])
    kind = PydanticCustomError("unknown_name", "one of {allowed}", {"allowed": ", ".join(allowed)})
    detail = InitErrorDetails(type=kind if "name" in value else "missing", loc=("name",), input=value.get("name"))
    raise ValidationError.from_exception_data("name", [detail])


def _strictly(settings: type[BaseModel], value: Mapping[str, Any]) -> Any:
    # Through JSON, where strict validation still takes a list for a tuple.
    return settings.model_validate_json(json.dumps(value), strict=True)


def _choose_algorithm(value: Any) -> AlgorithmChoice:
    if isinstance(value, AlgorithmChoice):
        return value
    name = _named(value, available())
    keys = {key: item for key, item in value.items() if key != "name"}
    return AlgorithmChoice(name=name, settings=_strictly(find(name).settings, keys))


def _dump_algorithm(choice: AlgorithmChoice) -> dict[str, Any]:
    return {"name": choice.name, **choice.settings.model_dump(mode="json")}


class Experiment(Section):
    """Everything that decides a run."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name of the run's folder: letters, digits, dots, hyphens and underscores.",
    )
    seed: int = Field(
        default=1, ge=0, lt=2**63, description="Decides every random choice: partition, initialization, rounds."
    )
    data: Data = Field(description="Which data, and how they are dealt out to clients.")
    model: ModelSettings = Field(discriminator="name", description="The clients' model.")
    algorithm: Annotated[AlgorithmChoice, PlainValidator(_choose_algorithm), PlainSerializer(_dump_algorithm)] = Field(
        description="The method, and its settings."
    )
    federation: Federation = Field(description="The rounds.")
    evaluation: Evaluation = Field(
        default=Evaluation(), description="When and how every client's own model is measured."
    )
    runtime: Runtime = Field(default=Runtime(), description="What this machine uses: processes, threads, device.")
    storage: Annotated[str, AfterValidator(_place)] | None = Field(
        default=None,
        min_length=1,
        description="Where runs lie: a folder, in which each has its own; or s3://BUCKET/PREFIX, where those that lie "
        "in ./runs are published as they go (docs/storage.md). Null is ./runs.",
    )

    @property
    def runs(self) -> Path:
        """The folder in which the run's own folder is made."""
        return Path("runs" if self.storage is None or is_url(self.storage) else self.storage).expanduser()

    def resolved_yaml(self) -> str:
        """Return the experiment with every default filled in, as a file that ``load`` reads to the same experiment."""
        dumped = yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        return str(dumped)

    def shared_json(self) -> str:
        """Return what the aggregator sends to workers: all but ``runtime``, ``storage`` and where data lie.

        Equal experiments give equal text.
        """
        shared = self.model_dump(mode="json", exclude={"runtime": True, "storage": True, "data": {"root"}})
        return json.dumps(shared, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_shared_json(cls, text: str, *, root: str | None = None, runtime: Runtime | None = None) -> Experiment:
        """Complete what an aggregator sent with what is the worker's own.

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
            If the text is no experiment that this version of FedLoom can run.
        """
        source = "experiment sent by the aggregator"
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ExperimentError(f"{source}: not JSON ({error})") from error
        if not isinstance(value, dict) or not isinstance(value.get("data"), dict):
            raise ExperimentError(f"{source}: found {shown(value)}; allowed: a mapping with the key data")
        value["data"]["root"] = root
        value["runtime"] = (runtime or Runtime()).model_dump(mode="json")
        return _validated(value, source, {})


def load(path: str | Path, overrides: Overrides = ()) -> Experiment:
    """Read an experiment file.

    Parameters
    ----------
    path
        The file.
    overrides
        ``key=value`` each: a dotted key, and a YAML value that replaces what the file has there.

    Raises
    ------
    ExperimentError
        If the file cannot be read, or anything in it, or in a combination of its keys, is not allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{path}: not a UTF-8 text file (byte {error.start})") from error
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    return loads(text, overrides, source=str(path))


def loads(text: str, overrides: Overrides = (), *, source: str = "the experiment") -> Experiment:
    """Read the text of an experiment file.

    Parameters
    ----------
    text
        YAML, or JSON.
    overrides
        As of :func:`load`.
    source
        What to call the text in errors.

    Raises
    ------
    ExperimentError
        As of :func:`load`.
    """
    value, origins = _parse(text, source)
    if not isinstance(value, dict):
        raise ExperimentError(
            f"{source}: found {shown(value)}; allowed: a mapping with the keys name, data, model, ..."
        )
    for override in overrides:
        _set(value, origins, override)
    return _validated(value, source, origins)


def grid_values(text: str) -> tuple[str, list[str]]:
    """Read one axis of a grid, ``key=v1,v2,...``.

    Parameters
    ----------
    text
        A dotted key, then YAML values separated by commas (commas inside brackets, braces and quotes do not separate).

    Returns
    -------
    key
        The dotted key.
    values
        Each value as YAML on one line, to put behind ``key=`` in an override.

    Raises
    ------
    ExperimentError
        If it is not of that form, or a value occurs twice.
    """
    key, equals, values = text.partition("=")
    if not equals or not all(step.strip() for step in key.split(".")):
        raise ExperimentError(f"--grid {text}: allowed: KEY=VALUE,VALUE,..., such as algorithm.local.lr=0.01,0.03")
    parsed, _ = _parse(f"[{values}]", f"--grid {text}")
    if not isinstance(parsed, list) or not parsed:
        raise ExperimentError(f"--grid {text}: found no value; allowed: KEY=VALUE,VALUE,...")
    found = [as_yaml(value) for value in parsed]
    twice = [value for value in found if found.count(value) > 1]
    if twice:
        raise ExperimentError(f"--grid {text}: found {twice[0]} twice; allowed: each value once")
    return key.strip(), found


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"))
    return str(text).removesuffix("\n...\n").strip()


def json_schema(algorithms: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the JSON schema of an experiment file, for editors and documentation.

    Parameters
    ----------
    algorithms
        Names of the methods whose settings may stand under ``algorithm``; all that are registered by default.
    """
    choices: list[Any] = [_settings_with_name(name) for name in (available() if algorithms is None else algorithms)]
    described = Field(description=Experiment.model_fields["algorithm"].description)
    fields: dict[str, Any] = {"algorithm": (functools.reduce(operator.or_, choices), described)}
    whole = create_model("Experiment", __base__=Experiment, **fields)
    schema = whole.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


@functools.cache
def _settings_with_name(name: str) -> type[BaseModel]:
    settings = find(name).settings
    fields: dict[str, Any] = {"name": (Literal[name], Field(description="Which method."))}
    return create_model(settings.__name__, __base__=settings, **fields)


# Checking


def _validated(value: dict[str, Any], source: str, origins: Mapping[mistakes.Path, str]) -> Experiment:
    try:
        experiment = Experiment.model_validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        algorithm = value.get("algorithm")
        name = algorithm.get("name") if isinstance(algorithm, dict) else None
        schema = json_schema([name] if name in available() else None)
        raise ExperimentError(mistakes.listing(source, mistakes.explain(error, schema, value), origins)) from None
    found = _impossible(experiment)
    if found:
        raise ExperimentError(mistakes.listing(source, found, origins))
    return experiment


def _impossible(experiment: Experiment) -> list[Mistake]:
    """Return the combinations of keys that cannot run, each at the key to change."""
    found: list[Mistake] = []

    def refuse(key: str, text: str) -> None:
        found.append(Mistake(tuple(key.split(".")), text))

    data, federation, runtime = experiment.data, experiment.federation, experiment.runtime
    algorithm = find(experiment.algorithm.name)
    try:
        data.partition.check(SOURCES[data.dataset].classes)
    except ExperimentError as error:
        key, _, text = str(error).partition(": ")
        refuse(key, text)
    if algorithm.needs_classes and not SOURCES[data.dataset].classes:
        refuse("data.dataset", f"found {data.dataset}, which has no classes; allowed with {algorithm.name}: all others")
    if not found:  # a model for data that must be changed anyway would be another mistake tomorrow
        source = SOURCES[data.dataset]
        # The scheme ``means`` draws examples of its own shape.
        shape = (data.partition.dimension,) if isinstance(data.partition, MeansScheme) else source.input_shape
        try:
            experiment.model.build(shape, source.classes, source.kind)
        except ExperimentError as error:
            key, _, text = str(error).partition(": ")
            refuse(key, text)
    if not algorithm.trains and federation.rounds:
        refuse("federation.rounds", f"found {federation.rounds}; allowed: 0, because {algorithm.name} has no rounds")
    if federation.rounds and data.seen is not None and federation.clients_per_round > data.seen:
        refuse(
            "federation.clients_per_round",
            f"found {federation.clients_per_round}; allowed: at most {data.seen}, the seen clients "
            f"({data.partition.clients} clients, unseen_fraction {data.unseen_fraction:g})",
        )
    if federation.min_replies > federation.clients_per_round:
        refuse(
            "federation.min_replies",
            f"found {federation.min_replies}; allowed: at most clients_per_round, {federation.clients_per_round}",
        )
    if experiment.evaluation.label_mask and not algorithm.labelled(experiment.algorithm.settings):
        refuse(
            "evaluation.label_mask", f"found true; allowed: false, because {algorithm.name} uses no labels as it is set"
        )
    if runtime.device == "cpu" and runtime.clients_at_once > 1:
        refuse("runtime.clients_at_once", f"found {runtime.clients_at_once}; allowed: 1 with device: cpu")
    return found


# Reading


class _Loader(yaml.SafeLoader):
    """YAML 1.2's idea of scalars: ``1e-3`` is a number, ``no`` is text, ``10:00`` is no number of minutes."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own shape)


class _Dumper(yaml.SafeDumper):
    """Quotes what any version of YAML would not read as text."""


_FLOAT = re.compile(
    r"^(?:[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
    r"|\.(?:nan|NaN|NAN))$"
)
_SCALARS = (  # the first that matches is taken
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    ("float", _FLOAT.pattern, list("-+.0123456789")),
    ("merge", r"^<<$", ["<"]),
)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _parse(text: str, source: str) -> tuple[Any, dict[mistakes.Path, str]]:
    """Return the value of a YAML document, and the line of each key."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        origins: dict[mistakes.Path, str] = {(): ""}
        twice: list[Mistake] = []
        _locate(node, (), origins, twice, set())
        if twice:
            raise ExperimentError(mistakes.listing(source, twice, origins))
        value = loader.construct_document(node)
        json.dumps(value, default=str)  # an anchor inside itself has no end
    except yaml.YAMLError as error:
        raise ExperimentError(f"{source}: not YAML: {_yaml_problem(error)}") from error
    except ValueError as error:
        raise ExperimentError(f"{source}: {error}") from error
    finally:
        loader.dispose()
    return value, origins


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "context", None) or str(error).replace("\n", " ")
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _locate(
    node: yaml.Node, path: mistakes.Path, origins: dict[mistakes.Path, str], twice: list[Mistake], visited: set[int]
) -> None:
    """Note the line of every key, and the keys that a mapping has twice (YAML would keep the last)."""
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            origins[(*path, position)] = f"line {item.start_mark.line + 1}"
            _locate(item, (*path, position), origins, twice, visited)
    elif isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            inner = (*path, str(key.value))
            line = f"line {key.start_mark.line + 1}"
            if inner in origins:
                twice.append(Mistake(inner, f"found again at {line}; allowed: each key once"))
            else:
                origins[inner] = line
            _locate(item, inner, origins, twice, visited)


def _set(value: dict[str, Any], origins: dict[mistakes.Path, str], override: str) -> None:
    """Put one ``key=value`` in its place."""
    key, equals, text = override.partition("=")
    path = tuple(step.strip() for step in key.split("."))
    if not equals or not all(path):
        raise ExperimentError(f"--set {override}: allowed: KEY=VALUE, such as federation.rounds=10")
    new, inside = _parse(text, f"--set {override}")
    target = value
    for depth, step in enumerate(path[:-1], start=1):
        if target.get(step) is None:
            target[step] = {}
            origins[path[:depth]] = "--set"
        target = target[step]
        if not isinstance(target, dict):
            raise ExperimentError(f"--set {override}: {dotted(path[:depth])} is {shown(target)}, which has no keys")
    target[path[-1]] = new
    for old in [p for p in origins if p[: len(path)] == path]:
        del origins[old]
    origins.update({(*path, *p): "--set" for p in inside} | {path: "--set"})
