"""Texts: tokens of a tokenizer of ``transformers``, and windows of characters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedloom.core.home import expanded
from fedloom.data.pack.examples import (
    Columns,
    OnProgress,
    Places,
    Request,
    TextColumn,
    ValidationErrors,
    undecodable_line,
)
from fedloom.data.spec import InputSpec
from fedloom.errors import DataError, ExperimentError, argument

ROWS = 4096
"""Texts processed at once."""

IDS, MASK = "input_ids", "attention_mask"
"""Names of the inputs that a tokenizer makes."""


def tokenize(
    texts: Sequence[object],
    settings: TextColumn,
    place: Callable[[int], str],
    errors: ValidationErrors,
    request: Request | None = None,
) -> tuple[dict[str, NDArray[np.int64]], dict[str, InputSpec]]:
    """Return the tokens of texts as inputs by name, ``[n, length]`` each, and their descriptions.

    Ids without a mask have the empty name. Texts that are missing, too long or without a token are recorded.

    Raise ExperimentError if ``transformers`` is not installed; DataError if the folder holds no tokenizer, it cannot
    pad, or an experiment requires other inputs.

    Parameters
    ----------
    place
        Returns the place of the i-th text.
    """
    tokenizer = _load_tokenizer(settings, errors.source)
    ids = InputSpec("integers", (settings.length,), high=len(tokenizer), tokenizer=tokenizer_digest(tokenizer))
    specs = {MASK: InputSpec("integers", (settings.length,), high=2), IDS: ids} if settings.mask else {"": ids}
    if request is not None and request.needs is not None:
        specs = _required_inputs(specs, request.needs.inputs, request.needed_by, errors.source)
    checked = [text if isinstance(text, str) and text.strip() else "" for text in texts]
    for i, text in enumerate(texts):
        if not checked[i]:
            missing = text is None or isinstance(text, str)
            errors.add("text missing" if missing else "not a text", f"{place(i)}{'' if missing else f': {text!r}'}")
    x = {name: np.zeros((len(texts), settings.length), dtype=np.int64) for name in specs}
    for start in range(0, len(checked), ROWS):
        some = checked[start : start + ROWS]
        tokens = tokenizer(some, padding="max_length", truncation=True, max_length=settings.length, return_tensors="np")
        empty = [start + i for i, count in enumerate(tokens[MASK].sum(1)) if some[i] and not count]
        errors.add_many("text without a token of the tokenizer", len(empty), map(place, empty))
        if settings.truncation == "refuse":
            lengths = {start + i: len(ids) for i, ids in enumerate(tokenizer(some)[IDS]) if len(ids) > settings.length}
            places = [f"{place(i)}: {length} tokens" for i, length in lengths.items()]
            errors.add(f"text of more than {settings.length} tokens", *places)
        for name in specs:
            x[name][start : start + ROWS] = tokens[name or IDS]
    return x, specs


def _load_tokenizer(settings: TextColumn, source: str) -> Any:
    """Return the tokenizer of a folder, with the sides that the settings name."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ExperimentError(
            f"{source}: tokens of a text need the package transformers, which is not installed",
            hint="pip install 'fedloom[text]'",
        ) from None
    folder = Path(expanded(settings.tokenizer))
    if not folder.is_dir():
        raise DataError(f"{folder} is not the folder of a tokenizer")
    sides: dict[str, str] = {} if settings.padding is None else {"padding_side": settings.padding}
    if settings.truncation not in (None, "refuse"):
        sides["truncation_side"] = settings.truncation
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **sides)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no tokenizer: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token is None:
        raise DataError(f"{folder}: the tokenizer has no padding token; set its pad_token and save it again")
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a SHA-256, hex, of everything that makes ids of a text.

    These are the pipeline of a tokenizer of the library ``tokenizers``, or else its class and vocabulary; its special
    tokens; and the sides on which it pads and cuts.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        pipeline: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        pipeline = json.loads(backend.to_str())
        pipeline.update(truncation=None, padding=None)  # of the last call
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    facts = [pipeline, special, tokenizer.padding_side, tokenizer.truncation_side]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _required_inputs(
    specs: Mapping[str, InputSpec], expected: Mapping[str, InputSpec], needed_by: str, source: str
) -> dict[str, InputSpec]:
    """Return the inputs that are required, with the tokenizer's digest; raise DataError if they differ."""
    if set(specs) != set(expected) or not all(_fits(specs[name], expected[name]) for name in expected):
        raise DataError(
            f"{source}: a text gives the inputs {_description(specs)}; {needed_by} needs {_description(expected)}"
        )
    return {name: replace(spec, tokenizer=specs[name].tokenizer) for name, spec in expected.items()}


def _fits(spec: InputSpec, expected: InputSpec) -> bool:
    same = (spec.kind, spec.shape) == (expected.kind, expected.shape)
    return same and (spec.high or 0) <= (expected.high or 0) and expected.tokenizer in (None, spec.tokenizer)


def _description(specs: Mapping[str, InputSpec]) -> str:
    description = (
        f"{name} {list(spec.shape)} {spec.kind} below {spec.high}, tokenizer {spec.tokenizer or 'any'}".strip()
        for name, spec in specs.items()
    )
    return "; ".join(description)


def read_characters(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Columns:
    """Read a UTF-8 text as windows of characters, each labelled with the next character.

    The classes are its characters, and ``input_shape`` sets the characters per input.
    """
    needs = request.needs
    if needs is None or needs.kind != "tokens" or any(len(name) != 1 for name in needs.class_names):
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
    codes = {name: i for i, name in enumerate(needs.class_names)}
    unknown = "unknown character; data.own.classes must list it"
    for number, line in enumerate(text.split("\n"), start=1):
        errors.add(unknown, *(f"line {number}: {each!r}" for each in line if each not in codes))
    if "\n" in text and "\n" not in codes:
        errors.add(unknown, "line 1: '\\n', the end of a line")
    errors.refuse()
    window = needs.input_shape[0]
    if len(text) <= window:
        raise DataError(f"{path}: it has {len(text)} characters, but one input needs {window}; give a longer text")
    characters = np.array([codes[character] for character in text], dtype=np.uint8)
    return Columns(
        {"": np.ascontiguousarray(sliding_window_view(characters, window)[:-1])},
        needs.inputs,
        characters[window:],
        Places(range(1, len(text)), "character "),
        classes=needs.class_names,
        overlap=window,
    )
