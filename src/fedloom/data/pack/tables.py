"""Tables: CSV and Parquet, one example a row, a header with the names of the columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.pack.examples import (
    Batches,
    Examples,
    Mistakes,
    Request,
    Tell,
    input_shape,
    listed,
    positions,
    split_positions,
)
from fedloom.errors import DataError, ExperimentError

ROWS = 4096
"""Rows taken in at once."""


@dataclass
class _Table:
    """What is read of a table, whatever its format."""

    inputs: tuple[int, ...]
    label: int | None
    split: int | None
    client: int | None
    header: Sequence[str]
    batches: Batches
    row_name: str
    labels: list[str | None] = field(default_factory=list)
    splits: list[str | None] = field(default_factory=list)
    owners: list[str | None] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def where(self, i: int) -> str:
        """Name the i-th row."""
        return f"{self.row_name} {self.places[i]}"

    def cell(self, first: int) -> Callable[[int, int], str]:
        """Names row i, input j of the batch that begins with a row."""
        return lambda i, j: f"{self.where(first + i)}, column {self.header[self.inputs[j]]}"

    def examples(self, request: Request, notes: tuple[str, ...]) -> Examples:
        """Return what was read, unless anything was wrong."""
        mistakes = self.batches.mistakes
        y, classes = None, () if request.own is None else request.own.classes
        if self.label is not None:
            y, classes = positions(self.labels, request.own, self.where, mistakes)
        split = None if self.split is None else split_positions(self.splits, self.where, mistakes)
        owners = None if self.client is None else tuple(owner or "" for owner in self.owners)
        missing = [i for i, owner in enumerate(owners or ()) if not owner]
        mistakes.add_many("client missing", len(missing), (self.where(i) for i in missing))
        kind = self.batches.kind
        columns = tuple(self.header[i] for i in self.inputs) if kind == "features" else None
        return Examples(
            kind, classes, self.batches.joined(), y, split, self.where, notes=notes, owners=owners, features=columns
        )


def _begin(
    header: Sequence[str], request: Request, mistakes: Mistakes, row_name: str
) -> tuple[_Table, tuple[str, ...]]:
    """Find the columns by their names.

    Raises
    ------
    DataError
        If one is missing, or there twice, or there are more or fewer than inputs have numbers.
    """
    own, source = request.own, mistakes.source
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{source}: found column {twice!r} twice; allowed: each once")

    def column(name: str, option: str) -> int:
        if name not in header:
            raise DataError(f"{source}: found no column {name!r}; allowed with {option}: {listed(header)}")
        return header.index(name)

    label = column(request.label, "--label COLUMN (or --unlabelled, without labels)") if request.labelled else None
    split = None if request.split is None else column(request.split, "--split")
    client = None if request.client is None else column(request.client, "client")
    if own is not None and own.features is not None:
        inputs = tuple(column(name, "data.own.features") for name in own.features)
    else:
        inputs = tuple(i for i in range(len(header)) if i not in (label, split, client))
    ignored = [name for i, name in enumerate(header) if i not in (*inputs, label, split, client)]
    if own is not None:
        shape = input_shape(own, len(inputs), "columns of inputs", source)
        batches = Batches(own.kind, shape, len(own.classes), mistakes)
    elif inputs:
        batches = Batches("features", (len(inputs),), 0, mistakes)
    else:
        raise DataError(f"{source}: found no column beside {listed(header)}; expected features")
    notes = (f"columns ignored: {listed(ignored)}",) if ignored else ()
    return _Table(inputs, label, split, client, header, batches, row_name), notes


def read_csv(path: Path, request: Request, mistakes: Mistakes, tell: Tell) -> Examples:
    """Read a CSV file (RFC 4180, UTF-8) with a header.

    Raises
    ------
    DataError
        If it is no such file, has no header, or lacks a column.
    """
    total = path.stat().st_size
    table: _Table | None = None
    rows: list[list[str]] = []
    line = 0
    with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(header, mistakes.source)
            table, notes = _begin(header, request, mistakes, "line")
            for row in reader:
                line = reader.line_num
                if not row:
                    continue  # an empty line
                if len(row) != len(header):
                    mistakes.add(f"another number of cells; allowed: {len(header)}", f"line {line}: {len(row)}")
                    continue
                rows.append(row)
                table.places.append(line)
                if len(rows) == ROWS:
                    tell("reading rows", raw.tell(), total)
                    _take_text(table, rows, mistakes)
                    rows.clear()
        except UnicodeDecodeError:
            mistakes.add("no UTF-8 text", f"after line {line}")
        except csv.Error as error:
            mistakes.add("no CSV", f"after line {line}: {error}")
    if table is None:
        mistakes.refuse()
        raise AssertionError("a file without a header was refused")
    _take_text(table, rows, mistakes)
    return table.examples(request, notes)


def _check_header(header: Sequence[str], source: str) -> None:
    if not any(header):
        raise DataError(f"{source}: found nothing in the first line; expected the names of the columns")
    if all(_number(cell) is not None for cell in header):
        raise DataError(f"{source}: found numbers in the first line; expected the names of the columns")
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise DataError(f"{source}: found {header[0]!r:.60} in the first line; expected names separated by commas")


def _take_text(table: _Table, rows: Sequence[Sequence[str]], mistakes: Mistakes) -> None:
    """Take in rows of text; what is no number is noted."""
    if not rows:
        return
    if table.label is not None:
        table.labels += [row[table.label].strip() or None for row in rows]
    if table.split is not None:
        table.splits += [row[table.split] for row in rows]
    if table.client is not None:
        table.owners += [row[table.client].strip() or None for row in rows]
    first = len(table.places) - len(rows)
    chosen = [[row[i] for i in table.inputs] for row in rows]
    try:
        values = np.array(chosen).astype(np.float64)
        known = np.zeros(values.shape, dtype=np.bool_)
    except ValueError:
        values, known = _cell_by_cell(chosen, table.cell(first), mistakes)
    table.batches.add(values, table.cell(first), known)


def _cell_by_cell(
    rows: Sequence[Sequence[str]], where: Callable[[int, int], str], mistakes: Mistakes
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    values = np.zeros((len(rows), len(rows[0])))
    known = np.zeros(values.shape, dtype=np.bool_)
    for i, row in enumerate(rows):
        for j, text in enumerate(row):
            number = _number(text)
            if number is None:
                known[i, j] = True
                if text.strip():
                    mistakes.add("no number", f"{where(i, j)}: {text!r}")
                else:
                    mistakes.add("value missing", where(i, j))
            else:
                values[i, j] = number
    return values, known


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read_parquet(path: Path, request: Request, mistakes: Mistakes, tell: Tell) -> Examples:
    """Read a Parquet file: a column for each number of an input.

    Raises
    ------
    ExperimentError
        If pyarrow is not installed.
    DataError
        If it is no such file, lacks a column, or one holds no numbers.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ExperimentError(
            f"{path}: reading Parquet needs pyarrow, which is not installed",
            hint="pip install 'fedloom[parquet]', or pack a CSV file",
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            schema, total = file.schema_arrow, file.metadata.num_rows
            table, notes = _begin(list(schema.names), request, mistakes, "row")
            numbers = [table.header[i] for i in table.inputs]
            for name in numbers:
                kind = schema.field(name).type
                if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind)):
                    mistakes.add("column without numbers; allowed: integers and floats", f"{name}: {kind}")
            mistakes.refuse()
            named = [
                name for i in (table.label, table.split, table.client) if i is not None for name in [table.header[i]]
            ]
            for batch in file.iter_batches(batch_size=ROWS, columns=[*numbers, *named]):
                tell("reading rows", len(table.places), total)
                _take_columns(table, batch, numbers, mistakes)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: no whole Parquet file: {str(error).splitlines()[0]}") from error
    return table.examples(request, notes)


def _take_columns(table: _Table, batch: Any, numbers: Sequence[str], mistakes: Mistakes) -> None:
    """Take in columns of numbers; what is null is noted."""
    first = len(table.places)
    table.places += range(first + 1, first + batch.num_rows + 1)
    if table.label is not None:
        table.labels += [_text(value) for value in batch.column(table.header[table.label]).to_pylist()]
    if table.split is not None:
        table.splits += [_text(value) for value in batch.column(table.header[table.split]).to_pylist()]
    if table.client is not None:
        table.owners += [_text(value) for value in batch.column(table.header[table.client]).to_pylist()]
    columns = [batch.column(name) for name in numbers]
    known = np.stack([column.is_null().to_numpy(zero_copy_only=False) for column in columns], axis=1)
    values = np.stack(
        [np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64) for column in columns], axis=1
    )
    values[known] = 0
    where = table.cell(first)
    mistakes.add_many(
        "value missing", int(known.sum()), (where(int(i), int(j)) for i, j in zip(*np.nonzero(known), strict=True))
    )
    table.batches.add(values, where, known)


def _text(value: object) -> str | None:
    return None if value is None else str(value).strip() or None
