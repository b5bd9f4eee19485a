"""Texts as tokens of a tokenizer of ``transformers``, read from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedloom.core.home import expanded
from fedloom.core.settings import Settings
from fedloom.errors import DataError, ExperimentError


class TextColumn(Settings):
    """Column of texts, and the tokenizer that makes tokens of it."""

    column: str = Field(min_length=1, description="Column with the texts.")
    tokenizer: str = Field(
        min_length=1, description="Folder of a tokenizer of transformers (`save_pretrained`); nothing is downloaded."
    )
    length: int = Field(ge=1, description="Tokens of each example: longer texts are cut, and shorter ones padded.")
    mask: bool = Field(
        default=True, description="True: the inputs are `input_ids` and `attention_mask`; false: the ids alone."
    )


def tokenized(texts: Sequence[Any], how: TextColumn, source: str) -> dict[str, NDArray[np.int64]]:
    """Return ``input_ids`` and, if asked for, ``attention_mask``, ``[n, length]`` each.

    Raise ExperimentError if ``transformers`` is not installed; DataError if the folder holds no tokenizer, it cannot
    pad, or an example is no text.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ExperimentError(
            f"{source}: a tokenizer needs the package transformers, which is not installed",
            hint="pip install transformers",
        ) from None
    folder = Path(expanded(how.tokenizer))
    if not folder.is_dir():
        raise DataError(f"{folder} is not the folder of a tokenizer")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no tokenizer: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token is None:
        raise DataError(f"{folder}: the tokenizer has no padding token; set its pad_token and save it again")
    wrong = [i for i, text in enumerate(texts) if not isinstance(text, str)]
    if wrong:
        found = type(texts[wrong[0]]).__name__
        raise DataError(f"{source}: column {how.column}: example {wrong[0]} is no text (got a {found})")
    tokens = tokenizer(list(texts), padding="max_length", truncation=True, max_length=how.length, return_tensors="np")
    names = ("input_ids", "attention_mask") if how.mask else ("input_ids",)
    return {name: tokens[name].astype(np.int64) for name in names}
