"""Messages for errors in an experiment file: line, key and allowed values, on one screen."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

from fedloom.core.words import pluralize, shortened
from fedloom.errors import argument

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys (and list positions) from the top level of the file."""

Schema: TypeAlias = Mapping[str, Any]
"""JSON schema, or a node of one."""

OWN_LOSS = "the loss is that of `task`, or the method `loss` of your own module (docs/models.md)"
ELSEWHERE: Mapping[str | int, str] = {
    **dict.fromkeys(("criterion", "loss", "loss_fn", "loss_function"), OWN_LOSS),
    **{key: f"set algorithm.local.{key}" for key in ("optimizer", "lr", "momentum", "batch_size", "steps", "epochs")},
}
"""Replacement of each key that training scripts have and experiments do not."""

MOST_SHOWN = 16
"""Maximum errors listed; the rest are only counted, so that all fit on one screen."""


@dataclass(frozen=True)
class SettingError:
    """Error at a key, with a one-line description and remedy."""

    path: KeyPath
    text: str


SET = argument("set")
"""Origin of a key set by an override; it stands before the key."""


def listing(source: str, errors: Sequence[SettingError], origins: Mapping[KeyPath, str]) -> str:
    """Lay out errors as lines of the form ``line 7, data.partition.clients: must be an integer (got "ten")``.

    Parameters
    ----------
    source
        The file, as the user named it.
    errors
        At least one.
    origins
        Origin of each key (``line 7``, or :data:`SET`); a missing key takes its parent's.
    """
    count = pluralize(len(errors), "error")
    lines = [f"{source}: {count}"]
    for error in errors[:MOST_SHOWN]:
        origin = next((origins[p] for p in _upwards(error.path) if p in origins), None)
        if origin == SET:
            where = f"{SET}{dotted(error.path)}"
        else:
            where = ", ".join(part for part in (origin, dotted(error.path)) if part)
        lines.append(f"  {where}: {error.text}" if where else f"  {error.text}")
    if len(errors) > MOST_SHOWN:
        lines.append(f"  ... and {len(errors) - MOST_SHOWN} more")
    return "\n".join(lines)


def explain(error: ValidationError, schema: Schema, value: Any) -> list[SettingError]:
    """Describe each error of a validation in the words of the schema.

    Parameters
    ----------
    error
        Errors found by pydantic.
    schema
        JSON schema of the whole file.
    value
        Content of the file: its ``name`` and ``scheme`` keys select branches of the schema.
    """
    errors: dict[KeyPath, SettingError] = {}
    for detail in error.errors(include_url=False):
        found = _explained(detail, schema, value)
        # The branches of a plain union each report their own error at the same key: keep the first.
        errors.setdefault(found.path, found)
    return list(errors.values())


def _explained(detail: ErrorDetails, schema: Schema, value: Any) -> SettingError:
    kind, found = detail["type"], detail["input"]
    loc: KeyPath = tuple(detail["loc"])
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = str(detail["ctx"]["discriminator"]).strip("'")
        loc, kind = (*loc, tag), "missing" if kind == "union_tag_not_found" else kind
        found = found.get(tag) if isinstance(found, dict) else found
    if kind in ("extra_forbidden", "refused_key"):
        path = (*_known(schema, loc[:-1], value), loc[-1])
        if kind == "refused_key":
            return SettingError(path, detail["msg"])
        place = f"; {ELSEWHERE[path[0]]}" if len(path) == 1 and path[0] in ELSEWHERE else ""
        return SettingError(path, f"unknown key{place}{_allowed_keys(schema, path, value)}")
    path = _known(schema, loc, value)
    if kind in ("value_error", "assertion_error"):  # a validator's own message
        text = detail["msg"].partition(", ")[2]
        key, _, rest = text.partition(": ")
        inner = _known(schema, (*path, *key.split(".")), value)
        return SettingError(inner, rest) if len(inner) > len(path) else SettingError(path, text)
    if kind == "missing":
        return SettingError(path, f"missing; it {_allowed_values(schema, path, value, None) or detail['msg']}")
    must = "must be a finite number" if kind == "finite_number" else _allowed_values(schema, path, value, found)
    turned_on = _mapping_for_true(schema, path, value) if found is True else ""
    return SettingError(path, f"{must or detail['msg']} (got {abbreviated(found)}){turned_on}")


def describe(node: Schema, root: Schema) -> str:
    """Describe the values that a node of a schema allows, such as ``an integer of at least 1``."""
    return _alternatives(_describe(branch, root) for branch in _branches(node, root))


def dotted(path: KeyPath) -> str:
    """Return a path in the form written after ``--set``."""
    return ".".join(str(step) for step in path)


def abbreviated(value: Any) -> str:
    """Return a value as YAML would show it, shortened to part of a line."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str))


def closest(word: object, known: Sequence[str]) -> str | None:
    """Return the known word closest to a misspelled one."""
    return next(iter(difflib.get_close_matches(str(word), known, n=1, cutoff=0.7)), None)


def branches(node: Schema, root: Schema, value: Any = None) -> list[Schema]:
    """Resolve references and unions; if a ``name`` or ``scheme`` in the value selects a branch, return only it."""
    found = list(_branches(node, root))
    picked = [b for b in found if isinstance(value, dict) and _selects(b, value)]
    return picked or found


def _alternatives(descriptions: Iterable[str]) -> str:
    different = list(dict.fromkeys(descriptions))
    return (", or " if any("," in description for description in different) else " or ").join(different)


def _selects(branch: Schema, value: Mapping[str, Any]) -> bool:
    properties: Mapping[str, Schema] = branch.get("properties", {})
    return any("const" in node and value.get(key) == node["const"] for key, node in properties.items())


def _branches(node: Schema, root: Schema) -> Iterator[Schema]:
    if "$ref" in node:
        yield from _branches(root["$defs"][node["$ref"].rpartition("/")[2]], root)
    elif "anyOf" in node or "oneOf" in node:
        for branch in node.get("anyOf", node.get("oneOf", ())):
            yield from _branches(branch, root)
    else:
        yield node


def _describe(node: Schema, root: Schema) -> str:
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return ", ".join(str(choice) for choice in node["enum"])
    return _describe_type(node, root)


def _describe_type(node: Schema, root: Schema) -> str:
    match node.get("type"):
        case "integer":
            return f"an integer{_bounds(node)}"
        case "number":
            return f"a number{_bounds(node)}"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array":
            return f"a list{_lengths(node)} of {describe(node.get('items', {}), root)}"
        case "object":
            return "a mapping"
        case "string":
            return f"text matching {node['pattern']}" if "pattern" in node else "text"
    return "any value"


def _bounds(node: Schema) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    first = f"at least {low}" if low is not None else f"above {above}" if above is not None else ""
    last = f"at most {high}" if high is not None else f"below {below}" if below is not None else ""
    both = " and ".join(part for part in (first, last) if part)
    return f", {both}" if both else ""


def _lengths(node: Schema) -> str:
    low, high = node.get("minItems"), node.get("maxItems")
    if low is None and high is None:
        return ""
    if low == high:
        return f" ({low} items)"
    return f" ({low or 0} or more items)" if high is None else f" ({low or 0} to {high} items)"


def _step(nodes: Sequence[Schema], step: str | int, value: Any) -> list[Schema]:
    """Return the schemas of an item or key; a mapping with free keys has those that stand in the value."""
    if isinstance(step, int):
        return [node["items"] for node in nodes if "items" in node]
    named = [node["properties"][step] for node in nodes if step in node.get("properties", {})]
    free = [node.get("additionalProperties") for node in nodes] if isinstance(value, dict) and step in value else []
    return named or [node for node in free if isinstance(node, Mapping)]


def _walk(schema: Schema, path: KeyPath, value: Any) -> tuple[KeyPath, list[Schema]]:
    """Follow a path through the schema: return the known steps, and the nodes at the end.

    Pydantic puts the tag or type of a union's branch into its paths; such a step is not a key, and is left out.
    """
    known: list[str | int] = []
    nodes = branches(schema, schema, value)
    for step in path:
        children = _step(nodes, step, value)
        if not children:
            continue
        value = _item(value, step)
        nodes = [branch for child in children for branch in branches(child, schema, value)]
        known.append(step)
    return tuple(known), nodes


def _item(value: Any, step: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    return value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None


def _known(schema: Schema, path: KeyPath, value: Any) -> KeyPath:
    return _walk(schema, path, value)[0]


def _allowed_values(schema: Schema, path: KeyPath, value: Any, found: Any) -> str:
    nodes = _walk(schema, path, value)[1]
    words = [str(word) for node in nodes for word in node.get("enum", [node["const"]] if "const" in node else [])]
    others = [_describe(node, schema) for node in nodes if "const" not in node and "enum" not in node]
    meant = closest(found, words)
    allowed = _alternatives([", ".join(dict.fromkeys(words)), *others] if words else others)
    if not allowed:
        return ""
    return f"did you mean {meant}? It must be {allowed}" if meant else f"must be {allowed}"


def _mapping_for_true(schema: Schema, path: KeyPath, value: Any) -> str:
    """Return the mapping to write in place of ``true``, if the key takes one."""
    for node in _walk(schema, path, value)[1]:
        if node.get("type") == "object":
            needed = ", ".join(f"{key}: ..." for key in node.get("required", ()))
            return f"; write {{{needed}}}" + ("" if needed else " for the defaults")
    return ""


def _allowed_keys(schema: Schema, path: KeyPath, value: Any) -> str:
    keys, key = _keys_at(schema, path[:-1], value), str(path[-1])
    meant = closest(key, keys)
    if meant is None:
        sections = [s for s in schema.get("properties", {}) if key in _keys_at(schema, (s,), value)]
        meant = f"{sections[0]}.{key}" if sections else None
    suggestion = f"; did you mean {meant}?" if meant else ""
    return (
        f"{suggestion or ';'} the keys are {', '.join(dict.fromkeys(keys))}"
        if keys
        else f"{suggestion}; it has no keys"
    )


def _keys_at(schema: Schema, path: KeyPath, value: Any) -> list[str]:
    return [name for node in _walk(schema, path, value)[1] for name in node.get("properties", {})]


def _upwards(path: KeyPath) -> Iterator[KeyPath]:
    for length in range(len(path), -1, -1):
        yield path[:length]
