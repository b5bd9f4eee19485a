"""YAML reader and writer for experiment files; the reader records the line of each key."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import suppress
from typing import Any

import yaml

from fedloom.errors import ExperimentError
from fedloom.experiment.validation_errors import KeyPath, SettingError, listing


class _Loader(yaml.SafeLoader):
    """Loader with YAML 1.2 scalars: ``1e-3`` is a number, ``no`` is text, ``10:00`` is not a number of minutes."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own shape)


_LOADERS: list[Any] = [_Loader]
if yaml.__with_libyaml__:  # ten times faster
    _LOADERS.insert(0, type("_FastLoader", (yaml.CSafeLoader,), {"yaml_implicit_resolvers": {}}))


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text that some version of YAML would read as another type."""


_FLOAT = re.compile(
    r"^(?:[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
    r"|\.(?:nan|NaN|NAN))$"
)
_SCALARS = (  # the first match wins
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    ("float", _FLOAT.pattern, list("-+.0123456789")),
    ("merge", r"^<<$", ["<"]),
)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
_LOADERS[0].yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


LONGEST = 2**20
"""Maximum characters of a text."""

MOST = 100_000
"""Maximum values of a text, including those repeated by aliases."""

DEEPEST = 50
"""Maximum nesting depth of lists and mappings."""


def parse_yaml(text: str, source: str) -> tuple[Any, dict[KeyPath, str]]:
    """Return the value of a YAML document, and the line of each key.

    If libyaml rejects a text, PyYAML's own parser either reads it or explains the error.

    Parameters
    ----------
    text
        One document.
    source
        Name of the text in errors.

    Raises
    ------
    ExperimentError
        If it is not YAML, a mapping has a key twice, or it is too large in characters, depth, or values.
    """
    if len(text) > LONGEST:
        raise ExperimentError(f"{source} has {len(text):,} characters; the limit is {LONGEST:,}")
    for loader in _LOADERS[:-1]:
        with suppress(yaml.YAMLError):
            return _parsed(loader, text, source)
    try:
        return _parsed(_LOADERS[-1], text, source)
    except yaml.YAMLError as error:
        raise ExperimentError(f"{source} is not YAML: {_yaml_problem(error)}") from error


def _parsed(loader_type: Any, text: str, source: str) -> tuple[Any, dict[KeyPath, str]]:
    origins: dict[KeyPath, str] = {(): ""}
    twice: list[SettingError] = []
    loader = loader_type(text)  # checks for characters that YAML does not allow
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        values, depth = _size(node, {})
        if depth > DEEPEST:
            raise RecursionError
        if values > MOST:
            raise ExperimentError(f"{source} has more than {MOST:,} values, counting those repeated by aliases")
        _locate(node, (), origins, twice, set())
        value = None if twice else json.loads(json.dumps(loader.construct_document(node), default=str))
    except RecursionError:
        problem = f"lists and mappings are nested more than {DEEPEST} deep, or an alias is inside itself"
        raise ExperimentError(f"{source}: {problem}") from None
    except (TypeError, ValueError) as error:  # a key that is not text; an integer of thousands of digits
        raise ExperimentError(f"{source}: {error}") from error
    finally:
        loader.dispose()
    if twice:
        raise ExperimentError(listing(source, twice, origins))
    return value, origins


def _size(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of values in a node with aliases expanded, and its nesting depth."""
    if id(node) not in known:
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        inside = itertools.chain(*below) if isinstance(node, yaml.MappingNode) else below
        sizes = [_size(each, known) for each in inside]
        known[id(node)] = 1 + sum(values for values, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    return known[id(node)]


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "context", None) or str(error).replace("\n", " ")
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _locate(
    node: yaml.Node, path: KeyPath, origins: dict[KeyPath, str], twice: list[SettingError], visited: set[int]
) -> None:
    """Record the line of every key, and the keys that a mapping has twice (YAML would keep the last)."""
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
                twice.append(SettingError(inner, f"is repeated at {line}; give each key once"))
            else:
                origins[inner] = line
            _locate(item, inner, origins, twice, visited)


def as_yaml_document(value: Any) -> str:
    """Return a value as a YAML file: one key per line, in their given order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line, quoted so that it may stand in a list."""
    text = str(yaml.dump([value], Dumper=_Dumper, default_flow_style=True, width=float("inf")))
    return text.strip().removeprefix("[").removesuffix("]")
