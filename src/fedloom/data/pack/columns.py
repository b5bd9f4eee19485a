"""Tables with typed columns: Parquet files and DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.listing import files_below
from fedloom.data.pack.examples import Examples, OnProgress, Request, ValidationErrors, check_unpacked, listed
from fedloom.data.pack.tables import ROWS, TableBuilder, table_builder
from fedloom.data.pack.targets import inferred_task
from fedloom.data.values import as_numbers, found_classes
from fedloom.errors import DataError, ExperimentError

if TYPE_CHECKING:
    from pandas import DataFrame

NOT_NUMBERS = "not a numeric column; features must be integers, floats, or true and false"
NUMERIC = {"i": "int64", "u": "uint64", "f": "float64", "b": "bool"}
"""Numpy type that holds a numeric column, by the kind code of its dtype."""


PARQUET = (".parquet", ".pq")
"""File extensions of Parquet files, and of the parts of a folder."""


def has_parts(folder: Path) -> bool:
    """Return True if the files in a folder are Parquet files, besides those that their writer adds (``_SUCCESS``)."""
    endings = {path.suffix.lower() for path in files_below(folder) if not path.name.startswith("_")}
    return bool(endings) and endings <= set(PARQUET)


def read_parquet(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Examples:
    """Read a Parquet file with one column for each number of an input; or a folder of such files, in order of name.

    Raise ExperimentError if pyarrow is not installed; DataError if a file is not Parquet, lacks a column, or has a
    feature column that is not numeric; or a folder has no such file, or folders of them.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ExperimentError(
            f"reading {path} needs pyarrow, which is not installed",
            hint="pip install 'fedloom[parquet]', or pack a CSV file",
        ) from None
    table: TableBuilder | None = None
    files, notes = _parts(path) if path.is_dir() else ([path], ())
    for part in files:
        try:
            with parquet.ParquetFile(part) as file:
                schema = file.schema_arrow
                if table is None:
                    table = table_builder(list(schema.names), request, errors, "row", _index_of(schema))
                elif set(schema.names) != set(table.header):
                    names = listed(schema.names), listed(table.header)
                    raise DataError(f"{part} has the columns {names[0]}; {files[0].name} has {names[1]}")
                check_unpacked(part, 8 * file.metadata.num_rows * (len(table.inputs) + 1))
                _add_file(table, file, "" if part == path else f" of {part.name}", on_progress)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{part} is not an intact Parquet file: {str(error).splitlines()[0]}") from error
    assert table is not None, "a folder without parts was refused"
    examples = table.examples()
    return replace(examples, notes=(*examples.notes, *notes))


def _add_file(table: TableBuilder, file: Any, whose: str, on_progress: OnProgress) -> None:
    """Add the rows of a Parquet file; errors call its i-th row ``row i`` and ``whose``."""
    from pyarrow.types import is_boolean, is_floating, is_integer

    errors = table.batches.errors
    for name in table.features:
        kind = file.schema_arrow.field(name).type
        if not (is_integer(kind) or is_floating(kind) or is_boolean(kind)):
            errors.add(NOT_NUMBERS, f"{name}: {kind}")
    errors.refuse()
    done = 0
    for batch in file.iter_batches(batch_size=ROWS, columns=list(dict.fromkeys(table.features + table.named))):
        on_progress("reading rows", done, file.metadata.num_rows)
        columns = [_of_arrow(batch.column(name)) for name in table.features]
        texts = {name: batch.column(name).to_pylist() for name in table.named}
        _take(table, columns, texts, [f"{done + i}{whose}" for i in range(1, batch.num_rows + 1)])
        done += batch.num_rows


def _parts(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Return the Parquet files of a folder, and a note on others; names that begin with ``_`` are the writer's own."""
    files = [path for path in files_below(folder) if not path.name.startswith("_")]
    parts = [path for path in files if path.suffix.lower() in PARQUET]
    if not parts:
        raise DataError(f"{folder} has no files that end in {', '.join(PARQUET)}")
    if deeper := [path for path in parts if path.parent != folder]:
        raise DataError(
            f"{folder}: {deeper[0].relative_to(folder)} is in a folder of its own, whose name may be a column; give "
            "parts that are in one folder, as pandas.read_parquet(FOLDER).to_parquet(FILE) writes them"
        )
    others = [path.name for path in files if path not in parts]
    return parts, (f"files left out: {listed(others)}",) if others else ()


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
