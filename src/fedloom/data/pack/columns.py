"""Tables with typed columns: Parquet files and DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.pack.examples import Examples, OnProgress, Request, ValidationErrors, check_unpacked
from fedloom.data.pack.tables import ROWS, TableBuilder, table_builder
from fedloom.data.pack.targets import inferred_task
from fedloom.data.values import as_numbers, found_classes
from fedloom.errors import DataError, ExperimentError

if TYPE_CHECKING:
    from pandas import DataFrame

NOT_NUMBERS = "not a numeric column; features must be integers, floats, or true and false"
NUMERIC = {"i": "int64", "u": "uint64", "f": "float64", "b": "bool"}
"""Numpy type that holds a numeric column, by the kind code of its dtype."""


def read_parquet(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Examples:
    """Read a Parquet file with one column for each number of an input.

    Raise ExperimentError if pyarrow is not installed; DataError if the file is not Parquet, lacks a column, or has a
    feature column that is not numeric.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ExperimentError(
            f"reading {path} needs pyarrow, which is not installed",
            hint="pip install 'fedloom[parquet]', or pack a CSV file",
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            schema, total = file.schema_arrow, file.metadata.num_rows
            table = table_builder(list(schema.names), request, errors, "row", _index_of(schema))
            check_unpacked(path, 8 * total * (len(table.inputs) + 1))
            of_numbers = arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean
            for name in table.features:
                if not any(is_one(schema.field(name).type) for is_one in of_numbers):
                    errors.add(NOT_NUMBERS, f"{name}: {schema.field(name).type}")
            errors.refuse()
            for batch in file.iter_batches(batch_size=ROWS, columns=list(dict.fromkeys(table.features + table.named))):
                first = len(table.places)
                on_progress("reading rows", first, total)
                columns = [_of_arrow(batch.column(name)) for name in table.features]
                texts = {name: batch.column(name).to_pylist() for name in table.named}
                _take(table, columns, texts, range(first + 1, first + batch.num_rows + 1))
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not an intact Parquet file: {str(error).splitlines()[0]}") from error
    return table.examples()


def _index_of(schema: Any) -> tuple[str, ...]:
    found = (schema.pandas_metadata or {}).get("index_columns", ())
    return tuple(name for name in found if isinstance(name, str))


def _of_arrow(column: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the values of a column, and a mask of the missing ones."""
    missing = column.is_null().to_numpy(zero_copy_only=False)
    whole = column.fill_null(False if str(column.type) == "bool" else 0) if column.null_count else column
    return whole.to_numpy(zero_copy_only=False), missing


def read_frame(frame: DataFrame, request: Request, errors: ValidationErrors) -> Examples:
    """Read a DataFrame with one row per example; the result is grouped by owner, in order of the owners' names.

    Raise DataError if a column is missing, a name occurs twice, or columns have several levels.
    """
    if frame.columns.nlevels > 1:
        raise DataError(
            f"{errors.source}: the columns have {frame.columns.nlevels} levels of names, and each needs one name",
            hint="frame.columns = ['_'.join(map(str, name)) for name in frame.columns]",
        )
    header = [str(name) for name in frame.columns]
    frame = frame.set_axis(header, axis=1)
    if request.wanted_task is None and not request.targets and request.label in header:
        label = frame[request.label]
        if label.dtype.kind == "f" and inferred_task([label.to_numpy(dtype=np.float64)], {}) == "regression":
            request = replace(request, task="regression")
    table = table_builder(header, request, errors, "row")
    for name in table.features:
        if frame[name].dtype.kind not in NUMERIC:
            errors.add(NOT_NUMBERS, f"{name}: {frame[name].dtype}")
    errors.refuse()
    for start in range(0, len(frame), ROWS):
        rows = frame.iloc[start : start + ROWS]
        columns = [_of_pandas(rows[name]) for name in table.features]
        texts = {name: rows[name].astype(object).where(rows[name].notna(), None).tolist() for name in table.named}
        _take(table, columns, texts, [repr(place) for place in rows.index.tolist()])
    examples = table.examples()
    errors.refuse()
    return _grouped_by_owner(examples)


def _of_pandas(series: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    missing = series.isna().to_numpy()
    values = np.zeros(len(series), dtype=NUMERIC[series.dtype.kind])
    values[~missing] = series[~missing].to_numpy(dtype=values.dtype)
    return values, missing


def _grouped_by_owner(examples: Examples) -> Examples:
    if examples.owners is None:
        return examples
    place = {name: i for i, name in enumerate(found_classes(examples.owners))}
    order = np.argsort([place[owner] for owner in examples.owners], kind="stable")
    return replace(
        examples,
        x=examples.chosen(order),
        y=None if examples.y is None else examples.y[order],
        split=None if examples.split is None else examples.split[order],
        where=lambda i: examples.where(int(order[i])),
        owners=tuple(examples.owners[i] for i in order),
    )


def _take(
    table: TableBuilder,
    columns: Sequence[tuple[NDArray[Any], NDArray[np.bool_]]],
    texts: dict[str, list[object]],
    places: Sequence[object],
) -> None:
    """Add rows: the values and missing mask of each feature, and the label, split and owner columns."""
    first, errors = len(table.places), table.batches.errors
    table.add_names(lambda column: texts[table.header[column]], places)
    if not columns:
        return
    missing = np.stack([mask for _, mask in columns], axis=1)
    known, values = missing.copy(), np.zeros(missing.shape)
    for j, (found, mask) in enumerate(columns):
        try:
            values[:, j] = as_numbers(np.where(mask, found.dtype.type(0), found))
        except ValueError as error:
            known[:, j] = True
            errors.add(str(error), f"column {table.features[j]}")
    where = table.cell(first)
    places_of_missing = (where(int(i), int(j)) for i, j in zip(*np.nonzero(missing), strict=True))
    errors.add_many("value missing", int(missing.sum()), places_of_missing)
    table.batches.add(values, where, known)
