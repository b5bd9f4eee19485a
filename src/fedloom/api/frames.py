"""DataFrames, with an installation hint if pandas is missing."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedloom.errors import ExperimentError

if TYPE_CHECKING:
    from pandas import DataFrame


def pandas(what: str) -> Any:
    """Return the pandas module.

    Parameters
    ----------
    what
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
            f"{what}: needs pandas, which is not installed", hint="pip install 'fedloom[notebook]'"
        ) from error
    return pandas


def of_lines(lines: Iterable[Mapping[str, Any]], what: str) -> DataFrame:
    """Return a DataFrame with an object per row; nested objects become columns with dotted names, null ones none."""
    frame: DataFrame = pandas(what).DataFrame([_flat(line) for line in lines])
    return frame


def of_csv(text: str, what: str, **options: Any) -> DataFrame:
    """Return a table that FedLoom has written; ``options`` go to ``pandas.read_csv``."""
    frame: DataFrame = pandas(what).read_csv(io.StringIO(text), keep_default_na=False, na_values=[""], **options)
    return frame


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            found |= _flat(item, f"{prefix}{key}.")
        elif item is not None or not prefix:
            found[f"{prefix}{key}"] = item
    return found
