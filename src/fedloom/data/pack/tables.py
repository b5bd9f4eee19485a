"""Tables with a header of column names and one example per row, and the CSV reader."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.data.manifest import Kind
from fedloom.data.pack.examples import (
    Batches,
    Examples,
    Request,
    Tell,
    ValidationErrors,
    input_shape,
    listed,
    names_of,
    notes_of_classes,
    positions,
    split_positions,
    undecodable_line,
)
from fedloom.data.values import EXACT, TRUTHS, number, whole
from fedloom.errors import DataError
from fedloom.words import composed, named_twice

ROWS = 4096
"""Rows processed at once."""

INDEX = re.compile(r"__index_level_[0-9]+__")
"""Column in which pandas stores an unnamed index in a Parquet file."""

UNNAMED = re.compile(r"Unnamed: [0-9]+")
"""Column that had no name when pandas read it."""


@dataclass
class Table:
    """Parsed content of a table in any format."""

    inputs: tuple[int, ...]
    label: int | None
    split: int | None
    client: int | None
    header: Sequence[str]
    batches: Batches
    row_name: str
    labels: list[object] = field(default_factory=list)
    splits: list[object] = field(default_factory=list)
    owners: list[object] = field(default_factory=list)
    places: list[object] = field(default_factory=list)
    truths: set[int] = field(default_factory=set)
    digits: set[int] = field(default_factory=set)

    def where(self, i: int) -> str:
        """Return the place of the i-th row."""
        return f"{self.row_name} {self.places[i]}"

    def cell(self, first: int) -> Callable[[int, int], str]:
        """Return a function that names row i, input j of the batch starting at row ``first``."""
        return lambda i, j: f"{self.where(first + i)}, column {self.header[self.inputs[j]]}"

    def examples(self, request: Request, notes: tuple[str, ...]) -> Examples:
        """Return the parsed examples, and record errors in labels, splits and owners."""
        mistakes = self.batches.mistakes
        y, classes = None, () if request.own is None else request.own.classes
        if self.label is not None:
            labels = names_of(self.labels, self.where, mistakes)
            y, classes = positions(labels, None if request.own is None else request.own.classes, self.where, mistakes)
            notes += notes_of_classes(classes) if request.own is None else ()
        split = None
        if self.split is not None:
            split = split_positions(names_of(self.splits, self.where, mistakes, "split"), self.where, mistakes)
        owners = None
        if self.client is not None:
            owners = tuple(name or "" for name in names_of(self.owners, self.where, mistakes, "client"))
        missing = [i for i, owner in enumerate(owners or ()) if not owner]
        mistakes.add_many("client missing", len(missing), (self.where(i) for i in missing))
        kind = self.batches.kind
        columns = tuple(self.header[i] for i in self.inputs) if kind == "features" else None
        x, changed = self.batches.joined()
        return Examples(
            kind, classes, x, y, split, self.where, notes=(*notes, *changed), owners=owners, features=columns
        )


def begin(
    header: Sequence[str], request: Request, mistakes: ValidationErrors, row_name: str, index: Sequence[str] = ()
) -> tuple[Table, tuple[str, ...]]:
    """Find the columns by their names.

    Parameters
    ----------
    index
        Columns that the source declares as a row index: they are no features unless requested.

    Raises
    ------
    DataError
        If a column is missing, occurs twice or has no name, or the number of columns does not fit the input shape.
    """
    own, source = request.own, mistakes.source
    names = [composed(name) for name in header]
    if (twice := named_twice([name for name in names if name])) is not None:
        raise DataError(f"{source}: two columns are called {twice!r}; each column needs a name of its own")

    def column(name: str, key: str) -> int:
        if composed(name) not in names:
            asked = key if "." in key else request.called(key)
            raise DataError(f"{source}: there is no column {name!r} ({asked}); the columns are {listed(header)}")
        return names.index(composed(name))

    label = column(request.label, "label") if request.labelled else None
    split = None if request.split is None else column(request.split, "split")
    client = None if request.client is None else column(request.client, "client")
    chosen = (label, split, client)
    notes: list[str] = []
    if own is not None and own.features is not None:
        inputs = tuple(column(name, "data.own.features") for name in own.features)
        ignored = [name for i, name in enumerate(header) if i not in (*inputs, *chosen)]
        notes += [f"columns ignored: {listed(ignored)}"] if ignored else []
    else:
        rows = _index(header, [i for i in range(len(header)) if i not in chosen], index, source)
        inputs = tuple(i for i in range(len(header)) if i not in (*chosen, *rows))
        left_out = [repr(header[i]) if header[i] else "the first, without a name" for i in rows]
        notes += [f"columns left out, as an index that numbers the rows: {listed(left_out)}"] if rows else []
    kind: Kind = "features"
    classes = 0
    if own is not None:
        shape = input_shape(own, len(inputs), "columns of inputs", source)
        kind, classes = own.kind, len(own.classes)
    elif inputs:
        shape = (len(inputs),)
    else:
        raise DataError(f"{source}: there is no column for features beside {listed(header)}")
    batches = Batches(kind, shape, classes, mistakes, lambda j: f"column {header[inputs[j]]}")
    return Table(inputs, label, split, client, header, batches, row_name), tuple(notes)


def _index(header: Sequence[str], rest: Sequence[int], index: Sequence[str], source: str) -> list[int]:
    """Return the columns that are an index of the rows, as pandas writes it.

    Raises
    ------
    DataError
        If a column that is no index has no name.
    """
    found = [i for i in rest if header[i] in index or INDEX.fullmatch(header[i]) or (i == 0 and _nameless(header[i]))]
    bare = next((i for i in rest if i not in found and _nameless(header[i])), None)
    if bare is not None:
        raise DataError(
            f"{source}: column {bare + 1} of {len(header)} has no name; name it in the header, or remove it"
        )
    return found


def _nameless(name: str) -> bool:
    return not name or UNNAMED.fullmatch(name) is not None


def read_csv(path: Path, request: Request, mistakes: ValidationErrors, tell: Tell) -> Examples:
    """Read a CSV file (RFC 4180, UTF-8) with a header.

    Raises
    ------
    DataError
        If the file is not CSV, has no header, or lacks a column.
    """
    total = path.stat().st_size
    table: Table | None = None
    rows: list[list[str]] = []
    line = 0
    with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            line = reader.line_num
            _check_header(header, mistakes.source)
            table, notes = begin(header, request, mistakes, "line")
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
            mistakes.add("no UTF-8 text", f"line {undecodable_line(path)}")
        except csv.Error as error:
            mistakes.add("no CSV", f"after line {line}: {error}")
    if table is None:
        mistakes.refuse()
        raise AssertionError("a file without a header was refused")
    _take_text(table, rows, mistakes)
    mixed = sorted(table.truths & table.digits)
    mistakes.add_many("true or false among numbers", len(mixed), (table.batches.name(j) for j in mixed))
    return table.examples(request, notes)


def _check_header(header: Sequence[str], source: str) -> None:
    if not any(header):
        raise DataError(f"{source}: found nothing in the first line; expected the names of the columns")
    if all(number(cell) is not None for cell in header):
        raise DataError(f"{source}: found numbers in the first line; expected the names of the columns")
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise DataError(f"{source}: found {header[0]!r:.60} in the first line; expected names separated by commas")


def _take_text(table: Table, rows: Sequence[Sequence[str]], mistakes: ValidationErrors) -> None:
    """Add rows of text; cells that are not numbers are recorded as errors."""
    if not rows:
        return
    for column, texts in ((table.label, table.labels), (table.split, table.splits), (table.client, table.owners)):
        if column is not None:
            texts += [row[column] for row in rows]
    first = len(table.places) - len(rows)
    chosen = [[row[i] for i in table.inputs] for row in rows]
    joined = "".join(text for row in chosen for text in row)
    try:
        if "_" in joined or not joined.isascii():
            raise ValueError("Python reads more as numbers than a table may hold")
        values = np.array(chosen).astype(np.float64)
        known = np.zeros(values.shape, dtype=np.bool_)
        if (np.abs(values) > EXACT).any():
            raise ValueError("an integer may not be what the file holds")
        table.digits.update(range(len(table.inputs)))
    except ValueError:
        values, known = _cell_by_cell(chosen, table, first, mistakes)
    table.batches.add(values, table.cell(first), known)


def _cell_by_cell(
    rows: Sequence[Sequence[str]], table: Table, first: int, mistakes: ValidationErrors
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    where = table.cell(first)
    values = np.zeros((len(rows), len(rows[0])))
    known = np.zeros(values.shape, dtype=np.bool_)
    for i, row in enumerate(rows):
        for j, text in enumerate(row):
            found = number(text)
            truth = TRUTHS.get(text.strip().lower())
            if found is None and truth is None:
                known[i, j] = True
                if text.strip():
                    mistakes.add("no number", f"{where(i, j)}: {text!r}")
                else:
                    mistakes.add("value missing", where(i, j))
            elif found is not None and abs(found) > EXACT and whole(text):
                known[i, j] = True
                mistakes.add("integer beyond 2^53, which cannot be a feature", f"{where(i, j)}: {text}")
            else:
                values[i, j] = truth if found is None else found
                (table.digits if truth is None else table.truths).add(j)
    return values, known
