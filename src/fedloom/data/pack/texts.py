"""Text: windows of characters, each labelled with the next character."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fedloom.data.pack.examples import Examples, OnProgress, Request, ValidationErrors, undecodable_line
from fedloom.errors import DataError, ExperimentError, argument


def read_characters(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Examples:
    """Read a UTF-8 text; the classes are its characters, and ``input_shape`` sets the characters per input."""
    own = request.own
    if own is None or own.kind != "tokens" or any(len(name) != 1 for name in own.classes):
        raise ExperimentError(
            f"{path} is a text, which needs {argument('experiment')} with kind: tokens in data.own, and classes of one "
            "character each."
        )
    if not request.labelled:
        raise ExperimentError(
            f"{argument('unlabelled')} is not for texts, whose labels are their next characters ({path}).",
            key="unlabelled",
        )
    on_progress("reading text", 0, None)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: line {undecodable_line(path)} is not UTF-8 text") from error
    codes = {name: i for i, name in enumerate(own.classes)}
    unknown = "unknown character; data.own.classes must list it"
    for number, line in enumerate(text.split("\n"), start=1):
        errors.add(unknown, *(f"line {number}: {each!r}" for each in line if each not in codes))
    if "\n" in text and "\n" not in codes:
        errors.add(unknown, "line 1: '\\n', the end of a line")
    errors.refuse()
    window = own.input_shape[0]
    if len(text) <= window:
        raise DataError(f"{path}: it has {len(text)} characters, but one input needs {window}; give a longer text")
    characters = np.array([codes[character] for character in text], dtype=np.uint8)
    return Examples(
        specs=own.spec.inputs,
        classes=own.classes,
        x=np.ascontiguousarray(sliding_window_view(characters, window)[:-1]),
        y=characters[window:].astype(np.int64),
        split=None,
        where=lambda i: f"character {i + 1}",
        overlap=window,
    )
