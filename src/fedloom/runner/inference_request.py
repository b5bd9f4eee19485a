"""Parsing and checks of the Open Inference Protocol's requests for predictions (``runner/open_inference.py``)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import parsed_json
from fedloom.data.input_spec import DTYPES, InputSpec
from fedloom.runner.saved_models import SavedModel

MOST_DISCARDED = 64 << 20
"""Number of bytes that are read of a too large body before it is answered."""

DEEPEST = 16
"""Maximum nesting of a request."""

LONGEST_ID = 1024
"""Maximum length of a request's id, which the answer repeats, in characters."""

DATATYPES: Mapping[str, str] = {"uint8": "UINT8", "int64": "INT64", "float32": "FP32", "float64": "FP64"}
"""Datatypes of the protocol by their names in NumPy."""

INPUT, OUTPUT = "x", "output"
"""Names of a single input and of the output, as in exported models."""


class RequestRefused(Exception):
    """Error with which a request is answered: the HTTP status, and the reason for the peer."""

    def __init__(self, status: HTTPStatus, reason: str, **headers: str) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


def request_body(environ: Mapping[str, Any], most: int) -> bytes:
    """Return the body of a request."""
    if (
        environ.get("HTTP_CONTENT_ENCODING", "identity") != "identity"
        or "HTTP_INFERENCE_HEADER_CONTENT_LENGTH" in environ
    ):
        raise RequestRefused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be JSON, uncompressed and without binary tensors"
        )
    length = str(environ.get("CONTENT_LENGTH") or "")
    if not re.fullmatch(r"[0-9]{1,18}", length):
        raise RequestRefused(HTTPStatus.LENGTH_REQUIRED, "the request needs a Content-Length")
    if int(length) > most:
        _discard(environ, min(int(length), MOST_DISCARDED))
        reason = f"the body has {length} bytes; at most {most} are read"
        raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
    content: bytes = environ["wsgi.input"].read(int(length))
    if len(content) != int(length):
        raise RequestRefused(HTTPStatus.BAD_REQUEST, f"the body ended after {len(content)} of {length} bytes")
    return content


def _discard(environ: Mapping[str, Any], size: int) -> None:
    """Read a body that is too large: a client that is still sending would not see the answer."""
    while size > 0 and (piece := environ["wsgi.input"].read(min(size, 1 << 16))):
        size -= len(piece)


def checked_request(content: bytes) -> dict[str, Any]:
    """Return the request in a body, checked except for the data of its inputs."""
    try:
        request = parsed_json(content.decode("utf-8"), DEEPEST)
    except ValueError as error:
        raise _invalid(f"the body is not JSON: {error}") from None
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise _invalid("the body must be an object with a list of inputs")
    if "id" in request and not (isinstance(request["id"], str) and len(request["id"]) <= LONGEST_ID):
        raise _invalid(f"id must be a text of at most {LONGEST_ID} characters")
    if any(name != OUTPUT for name in _names(request.get("outputs", []))):
        raise _invalid(f"outputs may name {OUTPUT} only")
    return request


def _names(listed: Any) -> list[str | None]:
    """Return the names of listed tensors; None for anything that is not a named tensor."""
    if not isinstance(listed, list):
        return [None]
    named = (one.get("name") if isinstance(one, dict) else None for one in listed)
    return [name if isinstance(name, str) else None for name in named]


def request_inputs(listed: Sequence[Any], model: SavedModel) -> dict[str, NDArray[Any]]:
    """Return the arrays of a request's inputs by the names of the model's."""
    known = {name or INPUT: (name, spec) for name, spec in model.specs.items()}
    if Counter(_names(listed)) != Counter([*known]):  # Counter would take a mapping for counts
        raise _invalid(f"the inputs must be {', '.join(known)}")
    found = {}
    for one in listed:
        name, spec = known[one["name"]]
        found[name] = _array(one, spec, model.classes)
    if len({len(array) for array in found.values()}) > 1:
        raise _invalid("the inputs must have the same number of examples")
    return found


def _array(given: Mapping[str, Any], spec: InputSpec, classes: int) -> NDArray[Any]:
    """Return the array of an input, checked against its description."""
    name, dtype = given["name"], DTYPES[spec.kind]
    datatype, whole = DATATYPES[str(dtype)], dtype.kind != "f"
    if given.get("datatype") != datatype:
        raise _invalid(f"{name}: datatype must be {datatype}")
    shape = _shape(given, spec)
    numbers = _numbers(name, given.get("data"), shape)
    if not set(map(type, numbers)) <= ({int} if whole else {int, float}):
        raise _invalid(f"{name}: data must be {'whole ' if whole else ''}numbers")
    try:
        with np.errstate(over="ignore"):
            array = np.array(numbers, dtype if whole else np.float64).astype(dtype).reshape(shape)
    except (OverflowError, ValueError):
        raise _invalid(f"{name}: a number is out of the range of {datatype}") from None
    if (fault := spec.values_fault(array, classes)) is not None:
        raise _invalid(f"{name}: {fault}")
    if spec.high is not None and int(array.max()) >= spec.high:
        raise _invalid(f"{name}: an integer is {array.max()}; it must be below {spec.high}")
    return array


def _shape(given: Mapping[str, Any], spec: InputSpec) -> list[int]:
    """Return the shape of an input, checked against its description."""
    shape = given.get("shape")
    if isinstance(shape, list) and {*map(type, shape)} == {int} and shape[0] >= 1 and tuple(shape[1:]) == spec.shape:
        return shape
    wanted = ", ".join(["b", *map(str, spec.shape)])
    raise _invalid(f"{given['name']}: shape must be [{wanted}] with b of at least 1")


def _numbers(name: str, data: Any, shape: Sequence[int]) -> list[Any]:
    """Return tensor data in row-major order, given flat or nested."""
    level = data if isinstance(data, list) else []
    if level and isinstance(level[0], list):  # nested: every list has the size of its axis
        level = [level]
        for size in shape:
            if any(not isinstance(each, list) or len(each) != size for each in level):
                raise _invalid(f"{name}: data must be flat, or nested according to its shape")
            level = [*chain.from_iterable(level)]
    if len(level) != math.prod(shape):
        raise _invalid(f"{name}: data must have {math.prod(shape)} numbers (got {len(level)})")
    return level


def _invalid(reason: str) -> RequestRefused:
    return RequestRefused(HTTPStatus.BAD_REQUEST, reason)
