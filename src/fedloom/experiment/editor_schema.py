"""JSON schema of experiment files for editors: one error in a file is one message.

A union is checked against the member that its discriminator selects. With ``anyOf``, an editor reports the errors of
every member.
"""

from __future__ import annotations

from typing import Any

from fedloom.experiment.validation import json_schema

Node = dict[str, Any]

UNIONS = ("anyOf", "oneOf")


def editor_schema() -> Node:
    """Return the JSON schema of an experiment file with unions that discriminate."""
    schema = json_schema()
    definitions = {f"#/$defs/{name}": definition for name, definition in schema["$defs"].items()}
    found: Node = _discriminated(schema, definitions)
    return found


def _discriminated(value: Any, definitions: dict[str, Node]) -> Any:
    """Return a part of a schema in which unions of objects, and of one thing and null, are conditions."""
    if isinstance(value, list):
        return [_discriminated(each, definitions) for each in value]
    if not isinstance(value, dict):
        return value
    node = {
        key: _discriminated(each, definitions) for key, each in value.items() if key not in ("discriminator", *UNIONS)
    }
    for union in UNIONS:
        if union in value:
            members = [_discriminated(each, definitions) for each in value[union]]
            node |= _nullable(members, union, definitions)
    return node


def _nullable(members: list[Node], union: str, definitions: dict[str, Node]) -> Node:
    others = [each for each in members if each != {"type": "null"}]
    condition = others[0] if len(others) == 1 else _condition(others, definitions) or {union: others}
    return condition if len(others) == len(members) else {"if": {"type": "null"}, "then": {}, "else": condition}


def _condition(members: list[Node], definitions: dict[str, Node]) -> Node | None:
    """Return the condition that selects a member of a union of objects; None if nothing tells them apart."""
    objects = [definitions.get(each.get("$ref", ""), {}) for each in members]
    properties = [each.get("properties", {}) for each in objects]
    for key in ("name", "scheme"):
        values = [each[key]["const"] for each in properties if "const" in each.get(key, {})]
        if len(values) == len(members):
            selected = [
                {"if": {"properties": {key: {"const": value}}, "required": [key]}, "then": member}
                for value, member in zip(values, members, strict=True)
            ]
            return {"type": "object", "properties": {key: {"enum": values}}, "required": [key], "allOf": selected}
    if len(members) == 2:
        own = [key for key in objects[1].get("required", ()) if key not in properties[0]]
        if own:
            return {"if": {"type": "object", "required": own[:1]}, "then": members[1], "else": members[0]}
    return None
