"""Tables with a header of column names and one example per row: CSV and Parquet files, and DataFrames."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import composed, first_of, named_twice
from fedloom.data.pack.examples import (
    Columns,
    OnProgress,
    Places,
    Request,
    ValidationErrors,
    check_unpacked,
    undecodable_line,
)
from fedloom.data.pack.labels import owner_names, split_positions
from fedloom.data.pack.packer import has_fraction
from fedloom.data.pack.texts import tokenize
from fedloom.data.spec import InputSpec
from fedloom.data.values import EXACT, MISSING, TRUTHS, as_numbers, is_whole, number
from fedloom.errors import DataError, ExperimentError
from fedloom.tasks.names import KINDS

if TYPE_CHECKING:
    from pandas import DataFrame

ROWS = 4096
"""Number of rows processed at once."""

INDEX = re.compile(r"__index_level_[0-9]+__")
"""Name of the column in which pandas stores an unnamed index in a Parquet file."""

UNNAMED = re.compile(r"Unnamed: [0-9]+")
"""Name that pandas gives a column without a name."""

FEATURES, INTEGERS = "features", "integers"
"""Names of the inputs of a table with columns of measurements and columns of integers."""

PARQUET = (".parquet", ".pq")
"""File extensions of Parquet files."""

NOT_NUMBERS = "not a numeric column; features must be integers, floats, or true and false"
NUMERIC = {"i": "int64", "u": "uint64", "f": "float64", "b": "bool"}
"""Numpy type that holds a numeric column, by the kind code of its dtype."""

Rows: TypeAlias = tuple[Sequence[object], NDArray[np.float64], Mapping[str, Sequence[object]]]
"""Rows of a table: their places, the numbers ``[m, f]`` of its numeric columns, and the cells of the others."""


@dataclass(frozen=True)
class _Layout:
    """Names of the columns by their use; those of the inputs follow ``specs``."""

    inputs: Sequence[str]
    targets: Sequence[str]
    label: str | None
    split: str | None
    client: str | None
    text: str | None
    specs: Mapping[str, InputSpec]
    notes: tuple[str, ...]

    @property
    def numeric(self) -> list[str]:
        """Columns of numbers."""
        return [*self.inputs, *self.targets]

    @property
    def others(self) -> list[str]:
        """Columns of labels, splits, owners and texts."""
        columns = (self.label, self.split, self.client, self.text)
        return list(dict.fromkeys(column for column in columns if column is not None))


def read_csv(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Columns:
    """Read a CSV file (RFC 4180, UTF-8) with a header.

    Cells stay text but in columns of numbers; these must be ASCII digits with a point and an exponent, or true and
    false.
    """
    rows = _csv_rows(path, errors, on_progress)
    _, header = next(rows, (0, [""]))
    errors.refuse()
    header = [name.strip() for name in header]
    if not any(header) or all(number(cell) is not None for cell in header):
        reason = "has numbers" if any(header) else "is empty"
        raise DataError(f"{path}: the first line {reason}; it must have the names of the columns")
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise DataError(f"{path}: the first line is {header[0]!r:.60}; separate the names of the columns by commas")
    layout = _layout(header, request, errors.source)
    return _columns(layout, _csv_chunks(rows, header, layout, errors), "line ", request, errors)


def _csv_rows(path: Path, errors: ValidationErrors, on_progress: OnProgress) -> Iterator[tuple[int, list[str]]]:
    """Yield rows with the numbers of their last lines, up to the first that is damaged, which is recorded."""
    total, line = path.stat().st_size, 0
    with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            for row in rows:
                line = rows.line_num
                yield line, row
                if not line % ROWS:
                    on_progress("reading rows", raw.tell(), total)
        except UnicodeDecodeError:
            errors.add("not UTF-8 text", f"line {undecodable_line(path)}")
        except csv.Error as error:
            errors.add("malformed CSV", f"after line {line}: {error}")


def _csv_chunks(
    rows: Iterator[tuple[int, list[str]]], header: Sequence[str], layout: _Layout, errors: ValidationErrors
) -> Iterator[Rows]:
    """Yield rows with their numbers; record cells that are none, and columns that mix them with truth values."""
    place = {name: i for i, name in enumerate(header)}
    truths, digits = set[str](), set[str]()
    for chunk in iter(lambda: list(islice(rows, ROWS)), []):
        for line, row in chunk:
            if len(row) not in (0, len(header)):
                errors.add(f"another number of cells; each row must have {len(header)}", f"line {line}: {len(row)}")
        whole = [(line, row) for line, row in chunk if len(row) == len(header)]
        values = np.zeros((len(whole), len(layout.numeric)))
        for j, name in enumerate(layout.numeric):
            cells = [row[place[name]] for _, row in whole]
            if (plain := _plain_numbers(cells)) is not None:
                values[:, j] = plain
                digits.add(name)
                continue
            for i, cell in enumerate(cells):
                value, truth = number(cell), TRUTHS.get(cell.strip().lower())
                if fault := _fault(cell, value, truth):
                    excerpt = f": {cell!r}" if cell.strip() else ""
                    errors.add(fault, f"line {whole[i][0]}, column {name}{excerpt}")
                else:
                    (truths if value is None else digits).add(name)
                    values[i, j] = truth if value is None else value
        yield (
            [line for line, _ in whole],
            values,
            {name: [row[place[name]] for _, row in whole] for name in layout.others},
        )
    columns = [f"column {name}" for name in layout.numeric if name in truths & digits]
    errors.add("true or false among numbers", *columns)


def _plain_numbers(cells: Sequence[str]) -> NDArray[np.float64] | None:
    """Return the numbers in texts; None if each cell needs a check, because float() accepts more forms."""
    text = "".join(cells)
    if "_" in text or not text.isascii():
        return None
    try:
        values = np.array([float(cell) for cell in cells])
    except ValueError:
        return None
    return None if (np.abs(values) > EXACT).any() else values


def _fault(cell: str, value: float | None, truth: float | None) -> str | None:
    if value is None and truth is None:
        return "value missing" if cell.strip() in MISSING else "not a number"
    if value is not None and abs(value) > EXACT and is_whole(cell):
        return "integer beyond 2^53, which cannot be a feature"
    return None


def read_parquet(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Columns:
    """Read a Parquet file with one column for each number of an input.

    Raise ExperimentError if pyarrow or pandas is not installed; DataError if the file is not Parquet, lacks a column,
    or has a feature column that is not numeric.
    """
    try:
        import pandas
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ExperimentError(
            f"reading {path} needs pyarrow and pandas, which are not installed",
            hint="pip install 'fedloom[parquet]', or pack a CSV file",
        ) from None
    on_progress("reading rows", 0, None)
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            index = [name for name in (schema.pandas_metadata or {}).get("index_columns", ()) if isinstance(name, str)]
            layout = _layout(schema.names, request, errors.source, index)
            check_unpacked(path, 8 * file.metadata.num_rows * (len(layout.inputs) + 1))
            table = file.read(columns=list(dict.fromkeys((*layout.numeric, *layout.others))))
        frame = table.to_pandas(types_mapper=pandas.ArrowDtype, ignore_metadata=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not an intact Parquet file: {str(error).splitlines()[0]}") from error
    frame.index = range(1, len(frame) + 1)
    return _frame_columns(frame, layout, request, errors)


def read_frame(frame: DataFrame, request: Request, errors: ValidationErrors) -> Columns:
    """Read a DataFrame with one row per example.

    A label that is a float with fractions is a target of regression, unless the task is stated.

    Raise DataError if a column is missing or not numeric, a name occurs twice, or columns have several levels.
    """
    if frame.columns.nlevels > 1:
        raise DataError(
            f"{errors.source}: the columns have {frame.columns.nlevels} levels of names, and each needs one name",
            hint="frame.columns = ['_'.join(map(str, name)) for name in frame.columns]",
        )
    header = [str(name) for name in frame.columns]
    frame = frame.set_axis(header, axis=1)
    if header.count(request.label) == 1 and request.wanted_task is None and not request.targets:
        label = frame[request.label]
        if label.dtype.kind == "f" and has_fraction(label.to_numpy(dtype=np.float64, na_value=np.nan)):
            request = replace(request, task="regression")
    layout = _layout(header, request, errors.source)
    return replace(_frame_columns(frame, layout, request, errors), by_owner=True)


def _frame_columns(frame: DataFrame, layout: _Layout, request: Request, errors: ValidationErrors) -> Columns:
    wrong = [name for name in layout.numeric if frame[name].dtype.kind not in NUMERIC]
    errors.add(NOT_NUMBERS, *(f"{name}: {frame[name].dtype}" for name in wrong))
    errors.refuse()

    def chunks() -> Iterator[Rows]:
        for start in range(0, len(frame), ROWS):
            rows = frame.iloc[start : start + ROWS]
            places = [repr(place) for place in rows.index.tolist()]
            values = np.zeros((len(rows), len(layout.numeric)))
            for j, name in enumerate(layout.numeric):
                missing = rows[name].isna().to_numpy(dtype=bool)
                whole = np.zeros(len(rows), dtype=NUMERIC[rows[name].dtype.kind])
                whole[~missing] = rows[name][~missing].to_numpy(dtype=whole.dtype)
                values[:, j] = _checked_column(name, whole, missing, places, errors)
            cells = {name: rows[name].astype(object).where(rows[name].notna(), None) for name in layout.others}
            yield places, values, {name: column.tolist() for name, column in cells.items()}

    return _columns(layout, chunks(), "row ", request, errors)


def _checked_column(
    name: str, values: NDArray[Any], missing: NDArray[np.bool_], places: Sequence[str], errors: ValidationErrors
) -> NDArray[np.float64]:
    """Return the numbers of a typed column, 0 where they are missing; record those, and integers beyond 2^53."""
    empty = np.flatnonzero(missing).tolist()
    errors.add_many("value missing", len(empty), (f"row {places[i]}, column {name}" for i in empty))
    try:
        return as_numbers(values)
    except ValueError as error:
        errors.add(str(error), f"column {name}")
        return np.zeros(len(values))


# --- columns by their use ---------------------------------------------------------------------------------------------


def _columns(layout: _Layout, chunks: Iterable[Rows], noun: str, request: Request, errors: ValidationErrors) -> Columns:
    """Return the rows of a table; ``noun`` precedes the places of rows."""
    rows: list[object] = []
    parts = [np.zeros((0, len(layout.numeric)))]
    cells: dict[str, list[object]] = {name: [] for name in layout.others}
    for some, numbers, others in chunks:
        rows += some
        parts.append(numbers)
        for name, column in others.items():
            cells[name] += column
    values, x, names, start = np.concatenate(parts), dict[str, NDArray[Any]](), dict[str, Sequence[str]](), 0
    specs = layout.specs
    for name, spec in specs.items():
        end = start + math.prod(spec.shape)
        x[name] = values[:, start:end].reshape(-1, *spec.shape)
        names[name] = layout.inputs[start:end]
        start = end
    places = Places(rows, noun, names)
    if request.text is not None:
        text = request.text.column
        x, specs = tokenize(
            cells[layout.text or text], request.text, lambda i: f"{places.row(i)}, column {text}", errors, request
        )
        places.columns = {name: [text] * math.prod(spec.shape) for name, spec in specs.items()}
    y: NDArray[Any] | None = None
    if layout.targets:
        required = None if request.needs is None else request.needs.targets
        several = request.targets if required is None else required.shape
        y = values[:, start:] if several else values[:, start]
    elif layout.label is not None:
        y = np.empty(len(rows), dtype=object)
        y[:] = cells[layout.label]
    plain = request.text is None and not any(spec.kind in ("pixels", "tokens") for spec in specs.values())
    return Columns(
        x,
        specs,
        y,
        places,
        None if layout.split is None else split_positions(cells[layout.split], places.row, errors),
        None if layout.client is None else owner_names(cells[layout.client], places.row, errors),
        outputs=tuple(layout.targets),
        label_is_name=True,
        features=tuple(layout.inputs) if plain else None,
        notes=layout.notes,
    )


def _layout(header: Sequence[str], request: Request, source: str, index: Sequence[str] = ()) -> _Layout:
    """Find the columns by their names.

    Raise DataError if a column is missing, occurs twice or has no name, or the number of columns does not fit the input
    shape.

    Parameters
    ----------
    index
        Columns that the source declares as a row index: they are not features unless requested.
    """
    names = {composed(name): name for name in header}
    if (twice := named_twice([composed(name) for name in header if name])) is not None:
        raise DataError(f"{source}: two columns are named {twice!r}; give each column a unique name")

    def column(name: str, key: str) -> str:
        if composed(name) not in names:
            raise DataError(f"{source}: there is no column {name!r} ({key}); the columns are {first_of(header)}")
        return names[composed(name)]

    needs = request.needs
    required = () if needs is None or needs.targets is None else needs.targets.names
    several = (request.targets or required) if request.labelled else ()
    task = request.wanted_task
    numeric = request.labelled and (bool(request.targets) or (task is not None and not KINDS[task].is_class))
    key = request.called("targets" if several else "label")
    targets = [column(name, key) for name in several or (request.label,)] if numeric else []
    label = request.label if request.labelled and not numeric else None
    requested = {"label": label, "split": request.split, "client": request.client}
    columns = {key: None if name is None else column(name, request.called(key)) for key, name in requested.items()}
    rest = [name for name in header if name not in columns.values() and name not in targets]
    text = None if request.text is None else column(request.text.column, request.called("text"))
    specs: Mapping[str, InputSpec] = {}
    if text is not None:
        inputs, reason = [], "columns left out; the input is the text"
        ignored = [name for name in rest if name != text]
    elif request.features is not None:
        inputs = [column(name, f"{request.needed_by}.features") for name in request.features]
        reason = "columns ignored"
        ignored = [name for name in rest if name not in inputs]
    else:
        inputs, reason = (
            _without_index(rest, header, index, source),
            "columns left out, as an index that numbers the rows",
        )
        ignored = [repr(name) if name else "the first, without a name" for name in rest if name not in inputs]
    if text is None:
        integers = request.integers if needs is None and isinstance(request.integers, tuple) else ()
        last = [column(name, request.called("integers")) for name in integers]
        inputs = [*(name for name in inputs if name not in last), *last]
        specs = _specs(inputs, len(last), request, source)
    notes = (f"{reason}: {first_of(ignored)}",) if ignored else ()
    return _Layout(inputs, targets, columns["label"], columns["split"], columns["client"], text, specs, notes)


def _without_index(rest: Sequence[str], header: Sequence[str], index: Sequence[str], source: str) -> list[str]:
    """Return columns without those that pandas wrote as an index of the rows.

    Raise DataError if another column has no name.
    """
    nameless = [i for i, name in enumerate(header) if name in rest and (not name or UNNAMED.fullmatch(name))]
    if bare := [i for i in nameless if i and header[i] not in index]:
        raise DataError(
            f"{source}: column {bare[0] + 1} of {len(header)} has no name; name it in the header, or remove it"
        )
    numbers = {*index, *(header[i] for i in nameless)}
    return [name for name in rest if name not in numbers and not INDEX.fullmatch(name)]


def _specs(inputs: Sequence[str], integers: int, request: Request, source: str) -> Mapping[str, InputSpec]:
    """Return the tensors of the columns of inputs: one, or features and then integers.

    Raise DataError if there are no columns, or their number does not fit what an experiment requires.
    """
    if request.needs is None:
        if not inputs:
            raise DataError(f"{source}: it has no feature columns")
        if 0 < integers < len(inputs):
            return {
                FEATURES: InputSpec("features", (len(inputs) - integers,)),
                INTEGERS: InputSpec("integers", (integers,)),
            }
        return {"": InputSpec("integers" if request.integers else "features", (len(inputs),))}
    specs = request.needs.inputs
    if "" not in specs and set(specs) - {FEATURES, INTEGERS}:
        raise DataError(
            f"{source}: {request.needed_by}.inputs has {first_of(sorted(specs))}; a table has only {FEATURES} and "
            f"{INTEGERS}"
        )
    if len(inputs) != (width := sum(math.prod(spec.shape) for spec in specs.values())):
        shapes = ", ".join(f"{name or 'input_shape'} {list(spec.shape)}" for name, spec in specs.items())
        raise DataError(
            f"{source} has {len(inputs):,} columns of inputs; {request.needed_by} needs {width:,} ({shapes})"
        )
    return specs
