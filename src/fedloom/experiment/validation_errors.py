"""Messages for errors in an experiment file: line, key and pydantic's message, on one screen."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from fedloom.core.words import pluralize, shortened
from fedloom.errors import ExperimentError, argument

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

S = TypeVar("S", bound="BaseModel")

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


WORDS = {
    "Input should": "must",
    "an object": "a mapping",
    "a valid dictionary": "a mapping",
    "a valid array": "a list",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
"""Words of an experiment file for those of pydantic's messages."""

SET = argument("set")
"""Origin of a key set by an override; it stands before the key."""


def listing(source: str, errors: Sequence[SettingError], origins: Mapping[KeyPath, str]) -> str:
    """Lay out errors as lines of the form ``line 7, data.partition.clients: must be a valid integer (got "ten")``.

    Parameters
    ----------
    source
        The file, as the user named it.
    errors
        At least one.
    origins
        Origin of each key (``line 7``, or :data:`SET`); a missing key takes its parent's.
    """
    lines = [f"{source}: {pluralize(len(errors), 'error')}"]
    for error in errors[:MOST_SHOWN]:
        upwards = (error.path[:length] for length in range(len(error.path), -1, -1))
        origin = next((origins[path] for path in upwards if path in origins), "")
        parts = [f"{SET}{dotted(error.path)}"] if origin == SET else [origin, dotted(error.path)]
        place = ", ".join(filter(None, parts))
        lines.append(f"  {place}: {error.text}" if place else f"  {error.text}")
    if len(errors) > MOST_SHOWN:
        lines.append(f"  ... and {len(errors) - MOST_SHOWN} more")
    return "\n".join(lines)


def validate(kind: type[S], value: Any, source: str, origins: Mapping[KeyPath, str], *, key: str | None = None) -> S:
    """Return the settings in a mapping; raise ExperimentError, by default at the first key, that lists every error."""
    from pydantic import ValidationError

    try:  # through JSON, where strict validation still accepts a list for a tuple
        return kind.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        errors = explain(error, kind.model_json_schema(), value)
        raise ExperimentError(listing(source, errors, origins), key=key or dotted(errors[0].path)) from None


def explain(error: ValidationError, schema: Schema, value: Any) -> list[SettingError]:
    """Return the errors of a validation, each at its key, with suggestions from the JSON schema of the file."""
    texts: dict[KeyPath, dict[str, None]] = {}
    inputs: dict[KeyPath, str] = {}
    for detail in error.errors(include_url=False):
        path, text, shows_input = _explained(detail, schema, value)
        texts.setdefault(path, {})[text] = None  # the branches of a union each report an error at the same key
        inputs[path] = f" (got {abbreviated(detail['input'])})" if shows_input else ""
    return [SettingError(path, f"{', or '.join(parts)}{inputs[path]}") for path, parts in texts.items()]


def _explained(detail: ErrorDetails, schema: Schema, value: Any) -> tuple[KeyPath, str, bool]:
    """Return the key of an error, its message, and whether the message is followed by the value."""
    kind, loc, text = detail["type"], tuple(detail["loc"]), detail["msg"]
    path, context = _known(loc, value), detail.get("ctx", {})
    if kind == "refused_key":
        return (*_known(loc[:-1], value), loc[-1]), text, False
    if kind == "extra_forbidden":
        path = (*_known(loc[:-1], value), loc[-1])
        return path, f"unknown key{_suggestion(path, schema)}", False
    if kind in ("missing", "union_tag_not_found"):
        key = str(context["discriminator"]).strip("'") if kind == "union_tag_not_found" else loc[-1]
        return (*_known(loc[: -1 if kind == "missing" else None], value), key), "missing", False
    if kind in ("value_error", "assertion_error"):  # a validator's own message, which may name a key below
        text = text.partition(", ")[2]
        key, colon, rest = text.partition(": ")
        if colon and re.fullmatch(r"[a-z_]\w*(\.\w+)*", key):
            return (*path, *key.split(".")), rest, False
        return path, text, False
    if kind == "union_tag_invalid":
        path = (*path, str(context["discriminator"]).strip("'"))
        text = f"must be one of {context['expected_tags']} (got {context['tag']!r})".replace("'", "")
    for phrase, word in WORDS.items():
        text = text.replace(phrase, word, 1)
    allowed = context.get("expected_tags") or context.get("expected") or context.get("allowed") or ""
    word = context.get("tag", detail["input"])
    meant = closest(word, re.findall(r"[\w.-]+", str(allowed))) if isinstance(word, str) else None
    return path, f"did you mean {meant}? It {text}" if meant else text, kind != "union_tag_invalid"


def _known(loc: KeyPath, value: Any) -> KeyPath:
    """Return the steps of a location that are keys or positions of the value; others name branches of unions."""
    path: list[str | int] = []
    for step in loc:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step] if step < len(value) else None
        else:
            continue
        path.append(step)
    return tuple(path)


def _suggestion(path: KeyPath, schema: Schema) -> str:
    """Return what to write in place of an unknown key, if that is known."""
    if len(path) == 1 and path[0] in ELSEWHERE:
        return f"; {ELSEWHERE[path[0]]}"
    keys, name = list(dict.fromkeys(_dotted_keys(schema, schema))), str(path[-1])
    parent = dotted(tuple(step for step in path[:-1] if isinstance(step, str)))
    siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == parent]
    elsewhere = sorted((key for key in keys if key.rpartition(".")[2] == name), key=lambda key: key.count("."))
    meant = closest(name, siblings) or next(iter(elsewhere), None)
    listing = f"; the keys are {', '.join(siblings)}" if siblings else ""
    return f"; did you mean {meant}?" if meant else listing


def _dotted_keys(node: Schema, root: Schema, above: str = "") -> Iterator[str]:
    """Yield the dotted path of every key of a schema; those of a list's items follow the list's key."""
    if "$ref" in node:
        yield from _dotted_keys(root["$defs"][node["$ref"].rpartition("/")[2]], root, above)
    for branch in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _dotted_keys(branch, root, above)
    if isinstance(items := node.get("items"), Mapping):
        yield from _dotted_keys(items, root, above)
    for name, inner in node.get("properties", {}).items():
        yield f"{above}{name}"
        yield from _dotted_keys(inner, root, f"{above}{name}.")


def dotted(path: Iterable[str | int]) -> str:
    """Return a path in the form written after ``--set``."""
    return ".".join(map(str, path))


def abbreviated(value: Any) -> str:
    """Return a value as YAML would show it, shortened to part of a line."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str))


def closest(word: object, names: Sequence[str]) -> str | None:
    """Return the known word closest to a misspelled one."""
    return next(iter(difflib.get_close_matches(str(word), names, n=1, cutoff=0.7)), None)
