"""Requests for predictions, as the Open Inference Protocol has them (``runner/open_inference.py``), checked."""

from __future__ import annotations

import math
import re
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
"""Number of bytes of a body that is too large that are read before the answer."""

DEEPEST = 16
"""Maximum nesting of a request."""

LONGEST_ID = 1024
"""Maximum length of a request's id, which the answer repeats, in characters."""

DATATYPES: Mapping[str, str] = {"uint8": "UINT8", "int64": "INT64", "float32": "FP32", "float64": "FP64"}
"""Datatypes of the protocol by the names of NumPy's."""

INPUT, OUTPUT = "x", "output"
"""Names of a single input and of the output, as in exported models."""


class RequestRefused(Exception):
    """Request that is answered with an error.

    Parameters
    ----------
    status
        HTTP status.
    reason
        A sentence for the peer.
    """

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
    """Return a checked request, but for the data of its inputs."""
    try:
        request = parsed_json(content.decode("utf-8"), DEEPEST)
    except ValueError as error:
        raise _invalid(f"the body is not JSON: {error}") from None
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise _invalid("the body must be an object with a list of inputs")
    if "id" in request and not (isinstance(request["id"], str) and len(request["id"]) <= LONGEST_ID):
        raise _invalid(f"id must be a text of at most {LONGEST_ID} characters")
    outputs = request.get("outputs", [])
    wrong = not isinstance(outputs, list) or any(
        not isinstance(one, dict) or one.get("name") != OUTPUT for one in outputs
    )
    if wrong:
        raise _invalid(f"outputs may name {OUTPUT} only")
    return request


def request_inputs(listed: Sequence[Any], model: SavedModel) -> dict[str, NDArray[Any]]:
    """Return the arrays of a request's inputs by the names of the model's."""
    known = {name or INPUT: (name, spec) for name, spec in model.specs.items()}
    if any(not isinstance(one, dict) for one in listed) or sorted(str(one.get("name")) for one in listed) != sorted(
        known
    ):
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
    datatype = DATATYPES[str(dtype)]
    if given.get("datatype") != datatype:
        raise _invalid(f"{name}: datatype must be {datatype}")
    shape = sizes if isinstance(sizes := given.get("shape"), list) else []
    if not all(type(size) is int for size in shape) or shape[:1] < [1] or tuple(shape[1:]) != spec.shape:
        raise _invalid(f"{name}: shape must be [b, {', '.join(map(str, spec.shape))}] with b of at least 1")
    numbers = _numbers(name, given.get("data"), shape)
    kinds = {int} if dtype.kind in "iu" else {int, float}
    if not set(map(type, numbers)) <= kinds:
        raise _invalid(f"{name}: data must be {'whole ' if dtype.kind in 'iu' else ''}numbers")
    try:
        with np.errstate(over="ignore"):
            array = np.array(numbers, np.float64 if dtype.kind == "f" else dtype).astype(dtype).reshape(shape)
    except (OverflowError, ValueError):
        raise _invalid(f"{name}: a number is out of the range of {datatype}") from None
    if (fault := spec.values_fault(array, classes)) is not None:
        raise _invalid(f"{name}: {fault}")
    if spec.high is not None and int(array.max()) >= spec.high:
        raise _invalid(f"{name}: an integer is {array.max()}; it must be below {spec.high}")
    return array


def _numbers(name: str, data: Any, shape: Sequence[int]) -> list[Any]:
    """Return tensor data in row-major order, given flat or nested."""
    level = data if isinstance(data, list) else []
    if level and isinstance(level[0], list):  # nested: every list has the size of its axis
        level = [level]
        for size in shape:
            if any(not isinstance(each, list) or len(each) != size for each in level):
                raise _invalid(f"{name}: data must be flat, or nested as its shape says")
            level = [*chain.from_iterable(level)]
    if len(level) != math.prod(shape):
        raise _invalid(f"{name}: data must have {math.prod(shape)} numbers (got {len(level)})")
    return level


def _invalid(reason: str) -> RequestRefused:
    return RequestRefused(HTTPStatus.BAD_REQUEST, reason)
