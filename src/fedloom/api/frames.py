"""DataFrames, with an installation hint if pandas is missing."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedloom.core.words import dotted_keys
from fedloom.errors import ExperimentError

if TYPE_CHECKING:
    from pandas import DataFrame


def pandas(name: str) -> Any:
    """Return the pandas module.

    Parameters
    ----------
    name
        Name of the caller, for the error message.

    Raises
    ------
    ExperimentError
        If pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ExperimentError(
            f"{name} needs pandas, which is not installed", hint="pip install 'fedloom[notebook]'"
        ) from error
    return pandas


def frame_from_lines(lines: Iterable[Mapping[str, Any]], name: str) -> DataFrame:
    """Return a DataFrame with an object per row; nested objects become dotted columns, without null values."""
    rows = [
        {key: value for key, value in row.items() if value is not None or "." not in key}
        for row in map(dotted_keys, lines)
    ]
    frame: DataFrame = pandas(name).DataFrame(rows)
    return frame


def frame_from_csv(text: str, name: str, **options: Any) -> DataFrame:
    """Return a table that FedLoom has written; ``options`` go to ``pandas.read_csv``."""
    frame: DataFrame = pandas(name).read_csv(io.StringIO(text), keep_default_na=False, na_values=[""], **options)
    return frame
