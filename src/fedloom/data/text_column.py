"""Settings of a column of texts that become tokens."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from fedloom.core.settings import Settings

Side: TypeAlias = Literal["left", "right"]
"""Side of a text that is padded or cut."""

Truncation: TypeAlias = Literal["left", "right", "refuse"]
"""Side on which longer texts are cut, or their refusal."""


class TextColumn(Settings):
    """Column of texts, and the tokenizer that makes tokens of it."""

    column: str = Field(min_length=1, description="Column with the texts.")
    tokenizer: str = Field(
        min_length=1, description="Folder of a tokenizer of transformers (`save_pretrained`); nothing is downloaded."
    )
    length: int = Field(ge=1, description="Tokens of each example: longer texts are cut, and shorter ones padded.")
    padding: Side | None = Field(
        default=None, description="Side on which shorter texts are padded, left or right; null: the tokenizer's own."
    )
    truncation: Truncation | None = Field(
        default=None,
        description="Side on which longer texts are cut, left or right; refuse: they are errors; null: the tokenizer's "
        "own side.",
    )
    mask: bool = Field(
        default=True, description="True: the inputs are `input_ids` and `attention_mask`; false: only the ids."
    )
