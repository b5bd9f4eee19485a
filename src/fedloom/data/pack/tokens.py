"""Texts as tokens of a tokenizer of ``transformers``, read from a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.home import expanded
from fedloom.data.input_spec import InputSpec
from fedloom.data.pack.examples import ValidationErrors, listed
from fedloom.data.requirements import Own
from fedloom.data.text_column import TextColumn
from fedloom.errors import DataError, ExperimentError

ROWS = 4096
"""Texts processed at once."""

IDS, MASK = "input_ids", "attention_mask"
"""Names of the inputs that a tokenizer makes."""


@dataclass(frozen=True)
class TokenizedTexts:
    """Tokens of texts: inputs by name, ``[n, length]`` int64 each, and their descriptions.

    Ids without a mask have the empty name.
    """

    x: Mapping[str, NDArray[np.int64]]
    specs: Mapping[str, InputSpec]


def tokenized(
    texts: Sequence[object],
    how: TextColumn,
    where: Callable[[int], str],
    errors: ValidationErrors,
    own: Own | None = None,
) -> TokenizedTexts:
    """Return the tokens of texts, and record texts that are missing, too long or without a token.

    ``where`` returns the place of the i-th text.

    Raise ExperimentError if ``transformers`` is not installed; DataError if the folder holds no tokenizer, it cannot
    pad, or an experiment requires other inputs.
    """
    tokenizer = _opened(how, errors.source)
    specs = _specs(tokenizer, how, own, errors.source)
    checked = [_checked(text, where(i), errors) for i, text in enumerate(texts)]
    parts: list[dict[str, NDArray[np.int64]]] = []
    for start in range(0, len(checked), ROWS):
        some = checked[start : start + ROWS]
        made = tokenizer(some, padding="max_length", truncation=True, max_length=how.length, return_tensors="np")
        empty = [start + i for i, count in enumerate(made[MASK].sum(1)) if some[i] and not count]
        errors.add_many("text without a token of the tokenizer", len(empty), map(where, empty))
        if how.truncation == "refuse":
            lengths = {start + i: len(ids) for i, ids in enumerate(tokenizer(some)[IDS]) if len(ids) > how.length}
            places = [f"{where(i)}: {length} tokens" for i, length in lengths.items()]
            errors.add(f"text of more than {how.length} tokens", *places)
        parts.append({name: made[name].astype(np.int64) for name in (IDS, MASK)})
    nothing = np.zeros((0, how.length), dtype=np.int64)
    x = {name or IDS: np.concatenate([nothing, *(part[name or IDS] for part in parts)]) for name in specs}
    return TokenizedTexts({name: x[name or IDS] for name in specs}, specs)


def _checked(text: object, place: str, errors: ValidationErrors) -> str:
    """Return a text; record anything else, and return an empty one for it."""
    if text is None or (isinstance(text, str) and not text.strip()):
        errors.add("text missing", place)
    elif not isinstance(text, str):
        errors.add("not a text", f"{place}: {text!r}")
    else:
        return text
    return ""


def _opened(how: TextColumn, source: str) -> Any:
    """Return the tokenizer of a folder, with the sides that the settings name."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ExperimentError(
            f"{source}: tokens of a text need the package transformers, which is not installed",
            hint="pip install 'fedloom[text]'",
        ) from None
    folder = Path(expanded(how.tokenizer))
    if not folder.is_dir():
        raise DataError(f"{folder} is not the folder of a tokenizer")
    sides: dict[str, str] = {} if how.padding is None else {"padding_side": how.padding}
    if how.truncation not in (None, "refuse"):
        sides["truncation_side"] = how.truncation
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **sides)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no tokenizer: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token is None:
        raise DataError(f"{folder}: the tokenizer has no padding token; set its pad_token and save it again")
    return tokenizer


def digest_of(tokenizer: Any) -> str:
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


def _specs(tokenizer: Any, how: TextColumn, own: Own | None, source: str) -> dict[str, InputSpec]:
    """Return the descriptions of the inputs: those of an experiment, if they fit the tokenizer."""
    digest, size = digest_of(tokenizer), len(tokenizer)
    ids = InputSpec("integers", (how.length,), high=size, tokenizer=digest)
    made = {MASK: InputSpec("integers", (how.length,), high=2), IDS: ids} if how.mask else {"": ids}
    return made if own is None else _fitting(made, own, how.length, source)


def _fitting(made: Mapping[str, InputSpec], own: Own, length: int, source: str) -> dict[str, InputSpec]:
    """Return the inputs that an experiment requires, with the tokenizer's digest; raise DataError if they differ."""
    needed = dict(own.spec.inputs)
    if set(needed) != set(made) or any(each.kind != "integers" for each in needed.values()):
        found = listed([f"{name} {each.kind}".strip() for name, each in needed.items()])
        raise DataError(
            f"{source}: a text gives integers, {listed(sorted(filter(None, made))) or 'one tensor'}; data.own needs "
            f"{found}"
        )
    for name, spec in needed.items():
        if spec.shape != (length,):
            raise DataError(f"{source}: a text has {length} tokens; data.own needs inputs of {list(spec.shape)}")
        if (spec.high or 0) < (made[name].high or 0):
            raise DataError(f"{source}: {name} has integers below {made[name].high}; data.own needs {spec.high}")
        if spec.tokenizer not in (None, made[name].tokenizer):
            raise DataError(
                f"{source}: the tokenizer is {made[name].tokenizer}; data.own needs {spec.tokenizer}. Use the "
                "tokenizer of the experiment."
            )
    return {name: replace(spec, tokenizer=made[name].tokenizer) for name, spec in needed.items()}
