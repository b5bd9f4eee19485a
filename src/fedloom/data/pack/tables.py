"""Tables with a header of column names and one example per row, and the CSV reader."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import composed, named_twice
from fedloom.data.input_spec import InputSpec, unnamed
from fedloom.data.pack.examples import (
    Batches,
    ColumnBatches,
    Examples,
    OnProgress,
    Request,
    ValidationErrors,
    listed,
    names_of,
    notes_of_classes,
    owner_names,
    positions,
    spec_of,
    split_positions,
    undecodable_line,
)
from fedloom.data.pack.targets import inferred_task, notes_on_one_hot, one_hot_rows, read_targets
from fedloom.data.pack.tokens import tokenized
from fedloom.data.targets import Targets
from fedloom.data.values import EXACT, MISSING, TRUTHS, is_whole, number
from fedloom.errors import DataError

ROWS = 4096
"""Number of rows processed at once."""

INDEX = re.compile(r"__index_level_[0-9]+__")
"""Name of the column in which pandas stores an unnamed index in a Parquet file."""

FEATURES, INTEGERS = "features", "integers"
"""Names of the inputs of a table with columns of measurements and columns of integers."""

UNNAMED = re.compile(r"Unnamed: [0-9]+")
"""Name that pandas gives a column without a name."""


@dataclass
class TableBuilder:
    """Examples of a table in any format, whose rows arrive in chunks.

    Attributes
    ----------
    inputs, label, split, client, targets, text
        Positions of the columns in the header; None: no such column. A table with a column of texts has no ``inputs``.
    """

    request: Request
    header: Sequence[str]
    row_name: str
    batches: ColumnBatches
    inputs: tuple[int, ...]
    label: int | None
    split: int | None
    client: int | None
    notes: tuple[str, ...]
    targets: tuple[int, ...] = ()
    text: int | None = None
    texts: list[object] = field(default_factory=list)
    numbers: list[list[object]] = field(default_factory=list)
    labels: list[object] = field(default_factory=list)
    splits: list[object] = field(default_factory=list)
    owners: list[object] = field(default_factory=list)
    places: list[object] = field(default_factory=list)

    @property
    def features(self) -> list[str]:
        """Names of the columns of inputs."""
        return [self.header[i] for i in self.inputs]

    @property
    def named(self) -> list[str]:
        """Names of the columns of labels, splits, owners and texts."""
        found = (self.label, self.split, self.client, self.text, *self.targets)
        return [self.header[i] for i in found if i is not None]

    def where(self, i: int) -> str:
        """Return the place of the i-th row."""
        return f"{self.row_name} {self.places[i]}"

    def cell(self, first: int) -> Callable[[int, int], str]:
        """Return a function that names row i, input j of the chunk starting at row ``first``."""
        return lambda i, j: f"{self.where(first + i)}, column {self.header[self.inputs[j]]}"

    def add_names(self, column: Callable[[int], Sequence[object]], places: Sequence[object]) -> None:
        """Add rows at these places: labels, splits, owners and texts, from the column at each position."""
        self.places += places
        kept = (self.labels, self.splits, self.owners, self.texts)
        for position, taken in zip((self.label, self.split, self.client, self.text), kept, strict=True):
            if position is not None:
                taken += column(position)
        self.numbers += [list(row) for row in zip(*(column(position) for position in self.targets), strict=True)]

    def examples(self) -> Examples:
        """Return the parsed examples, and record errors in labels, splits and owners."""
        errors, own = self.batches.errors, self.request.own
        y: NDArray[Any] | None = None
        classes = () if own is None else own.classes
        notes, targets = self.notes, None
        x, changed, specs = self._inputs()
        if self.targets and self.request.wanted_task != "classification":
            y, targets, of_targets = self._read_targets(specs)
            notes += of_targets
        elif self.targets or self.label is not None:
            y, classes, of_classes = self._read_classes()
            notes += of_classes
        named = "" in specs and specs[""].kind in ("pixels", "tokens")
        split = None
        if self.split is not None:
            split = split_positions(names_of(self.splits, self.where, errors, "split"), self.where, errors)
        return Examples(
            specs,
            classes,
            unnamed(x),
            y,
            split,
            self.where,
            notes=(*notes, *changed),
            owners=None if self.client is None else owner_names(self.owners, self.where, errors),
            features=None if self.text is not None or named else tuple(self.features),
            targets=targets,
        )

    def _inputs(self) -> tuple[Mapping[str, NDArray[Any]], tuple[str, ...], Mapping[str, InputSpec]]:
        """Return the inputs by name, notes on changes, and the inputs' descriptions."""
        own = self.request.own
        if self.request.text is not None:
            tokens = tokenized(self.texts, self.request.text, self._text_place, self.batches.errors, own)
            return tokens.x, (), tokens.specs
        x, changed = self.batches.joined()
        if own is not None:
            return x, changed, own.spec.inputs
        return x, changed, {name: spec_of(self.batches.parts[name][0].kind, each) for name, each in x.items()}

    def _text_place(self, i: int) -> str:
        assert self.text is not None, "the table has a column of texts"
        return f"{self.where(i)}, column {self.header[self.text]}"

    def _read_classes(self) -> tuple[NDArray[np.int64], tuple[str, ...], tuple[str, ...]]:
        """Return the position of each row's class, the classes, and notes.

        Columns of targets that are 0 but for one 1 are classes of their names.
        """
        errors, request, labels = self.batches.errors, self.request, self.labels
        given = None if request.own is None else request.own.classes
        if self.targets:
            values, names = self._target_values(), [self.header[i] for i in self.targets]
            wrong = np.flatnonzero(~one_hot_rows(values)).tolist()
            fault = "not exactly one 1 among 0 in the targets, as task classification needs; label names one column"
            errors.add_many(fault, len(wrong), map(self.where, wrong))
            labels, given = [names[j] for j in values.argmax(1).tolist()], given or tuple(names)
        elif request.classes is not None:
            given = tuple(map(str, range(len(request.classes))))
        y, classes = positions(names_of(labels, self.where, errors, classes=given), given, self.where, errors)
        several = f"a column of 0 and 1 for each, named by {request.called('targets')},"
        notes = notes_of_classes(classes, several) if given is None else ()
        return y, classes if request.classes is None else request.classes, notes

    def _target_values(self) -> NDArray[np.float64]:
        """Return the numbers of the columns of targets, ``[n, k]``; record those that are missing or no numbers."""
        errors = self.batches.errors
        values = np.zeros((len(self.numbers), len(self.targets)))
        for i, row in enumerate(self.numbers):
            for j, cell in enumerate(row):
                found = _cell_number(cell)
                if found is None:
                    missing = cell is None or str(cell).strip() in MISSING
                    fault = "target missing" if missing else "target that is not a number"
                    errors.add(fault, f"{self.where(i)}, column {self.header[self.targets[j]]}: {cell!r}")
                else:
                    values[i, j] = found
        return values

    def _read_targets(self, specs: Mapping[str, InputSpec]) -> tuple[NDArray[Any], Targets, tuple[str, ...]]:
        """Return the numbers of the columns of targets, their description, and notes."""
        errors, request, values = self.batches.errors, self.request, self._target_values()
        own = None if request.own is None else request.own.spec.targets
        names = tuple(self.header[i] for i in self.targets) if own is None else own.names
        single = not request.targets if own is None else not own.shape
        y = values[:, 0] if single else values
        task = request.wanted_task or inferred_task([y], specs)
        if task == "classification":  # whole numbers, in one column or several
            task = "regression"
        y, targets, notes = read_targets([y], task, specs, self.where, errors, names=names)
        if task == "multilabel" and request.wanted_task is None:
            notes += notes_on_one_hot([y], request.called("task"))
        return y, targets, notes


def table_builder(
    header: Sequence[str], request: Request, errors: ValidationErrors, row_name: str, index: Sequence[str] = ()
) -> TableBuilder:
    """Find the columns by their names.

    Raise DataError if a column is missing, occurs twice or has no name, or the number of columns does not fit the input
    shape.

    Parameters
    ----------
    index
        Columns that the source declares as a row index: they are not features unless requested.
    """
    source = errors.source
    names = [composed(name) for name in header]
    if (twice := named_twice([name for name in names if name])) is not None:
        raise DataError(f"{source}: two columns are named {twice!r}; give each column a unique name")

    def column(name: str, key: str) -> int:
        if composed(name) not in names:
            raise DataError(f"{source}: there is no column {name!r} ({key}); the columns are {listed(header)}")
        return names.index(composed(name))

    numeric, key, of_targets = _target_names(request)
    targets = tuple(column(name, request.called(key)) for name in of_targets)
    label = request.label if request.labelled and not numeric else None
    asked = {"label": label, "split": request.split, "client": request.client}
    chosen = {key: None if name is None else column(name, request.called(key)) for key, name in asked.items()}
    rest = [i for i in range(len(header)) if i not in chosen.values() and i not in targets]
    text = None if request.text is None else column(request.text.column, request.called("text"))
    if text is None:
        inputs, ignored, why = _input_columns(header, rest, request, index, source, column)
    else:
        inputs, ignored, why = [], [header[i] for i in rest if i != text], "columns left out; the input is the text"
    batches = _batches(header, inputs, request, errors) if text is None else ColumnBatches({}, errors)
    notes = (f"{why}: {listed(ignored)}",) if ignored else ()
    found = chosen["label"], chosen["split"], chosen["client"]
    return TableBuilder(request, header, row_name, batches, tuple(inputs), *found, notes, targets, text)


def _input_columns(
    header: Sequence[str],
    rest: Sequence[int],
    request: Request,
    index: Sequence[str],
    source: str,
    column: Callable[[str, str], int],
) -> tuple[list[int], list[str], str]:
    """Return the columns of features, with those of integers last; the columns left out, described; and the reason.

    Raise DataError if there is none.
    """
    own = request.own
    if own is not None and own.features is not None:
        inputs = [column(name, "data.own.features") for name in own.features]
        return inputs, [header[i] for i in rest if i not in inputs], "columns ignored"
    inputs, ignored = _without_index(header, rest, index, source)
    if own is None:
        if not inputs:
            raise DataError(f"{source}: it has no feature columns; its columns are {listed(header)}")
        integers = request.integers if isinstance(request.integers, tuple) else ()
        last = [column(name, request.called("integers")) for name in integers]
        inputs = [*(i for i in inputs if i not in last), *last]
    return inputs, ignored, "columns left out, as an index that numbers the rows"


def _target_names(request: Request) -> tuple[bool, str, Sequence[str]]:
    """Return True if targets are numbers, the key that names their columns, and the columns' names."""
    numeric = request.labelled and (bool(request.targets) or request.wanted_task not in (None, "classification"))
    required = () if request.own is None or request.own.targets is None else request.own.targets.names
    several = request.targets or required
    names = (several or (request.label,)) if numeric else ()
    return numeric, "targets" if several else "label", [name for name in names if name is not None]


def _without_index(
    header: Sequence[str], rest: Sequence[int], index: Sequence[str], source: str
) -> tuple[list[int], list[str]]:
    """Return the columns of features, and descriptions of those that pandas wrote as an index of the rows.

    Raise DataError if another column has no name.
    """
    nameless = [i for i in rest if not header[i] or UNNAMED.fullmatch(header[i])]
    rows = [i for i in rest if header[i] in index or INDEX.fullmatch(header[i]) or i in nameless[:1] == [0]]
    if bare := [i for i in nameless if i not in rows]:
        raise DataError(
            f"{source}: column {bare[0] + 1} of {len(header)} has no name; name it in the header, or remove it"
        )
    described = [repr(header[i]) if header[i] else "the first, without a name" for i in rows]
    return [i for i in rest if i not in rows], described


def _batches(header: Sequence[str], inputs: Sequence[int], request: Request, errors: ValidationErrors) -> ColumnBatches:
    """Return the tensors that collect the columns of inputs: one, or features and integers.

    Raise DataError if their number does not fit what an experiment requires.
    """
    own, specs = request.own, dict[str, InputSpec]()
    if own is not None:
        specs = dict(own.spec.inputs)
        if len(inputs) != (needed := sum(math.prod(spec.shape) for spec in specs.values())):
            where = "data.own.inputs" if own.inputs is not None else f"data.own.input_shape {list(own.input_shape)}"
            raise DataError(f"{errors.source} has {len(inputs):,} columns of inputs; {where} needs {needed:,}")
        if "" not in specs and set(specs) - {FEATURES, INTEGERS}:
            found = listed(sorted(specs))
            raise DataError(f"{errors.source}: data.own.inputs has {found}; a table has only {FEATURES} and {INTEGERS}")
    elif request.integers and isinstance(request.integers, tuple) and len(request.integers) < len(inputs):
        integers = len(request.integers)
        specs = {
            FEATURES: InputSpec("features", (len(inputs) - integers,)),
            INTEGERS: InputSpec("integers", (integers,)),
        }
    else:
        specs = {"": InputSpec("integers" if request.integers else "features", (len(inputs),))}
    parts, start = {}, 0
    for name, spec in specs.items():
        columns = np.arange(start, start + math.prod(spec.shape))
        called = partial(_called, header, [inputs[j] for j in columns.tolist()])
        classes = 0 if own is None else len(own.classes)
        parts[name] = Batches(spec.kind, spec.shape, classes, errors, called, spec.high), columns
        start += len(columns)
    return ColumnBatches(parts, errors)


def _called(header: Sequence[str], inputs: Sequence[int], j: int) -> str:
    return f"column {header[inputs[j]]}"


def _cell_number(cell: object) -> float | None:
    """Return the number in a cell of a column of targets, if there is one."""
    if isinstance(cell, str):
        found = number(cell)
        return TRUTHS.get(cell.strip().lower()) if found is None else found
    return float(cell) if isinstance(cell, int | float | Decimal) else None


def read_csv(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Examples:
    """Read a CSV file (RFC 4180, UTF-8) with a header."""
    total = path.stat().st_size
    reader: _CsvReader | None = None
    line = 0
    with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(rows, [])]
            line = rows.line_num
            _check_header(header, errors.source)
            reader = _CsvReader(table_builder(header, request, errors, "line"))
            for row in rows:
                line = rows.line_num
                if reader.add(row, line):
                    on_progress("reading rows", raw.tell(), total)
        except UnicodeDecodeError:
            errors.add("not UTF-8 text", f"line {undecodable_line(path)}")
        except csv.Error as error:
            errors.add("malformed CSV", f"after line {line}: {error}")
    if reader is None:
        errors.refuse()
        raise AssertionError("a file without a header was refused")
    return reader.examples()


def _check_header(header: Sequence[str], source: str) -> None:
    if not any(header):
        raise DataError(f"{source}: the first line is empty; it must have the names of the columns")
    if all(number(cell) is not None for cell in header):
        raise DataError(f"{source}: the first line has numbers; it must have the names of the columns")
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise DataError(f"{source}: the first line is {header[0]!r:.60}; separate the names of the columns by commas")


class _CsvReader:
    """Rows of text that become numbers in chunks."""

    def __init__(self, table: TableBuilder) -> None:
        self.table = table
        self.errors = table.batches.errors
        self.rows: list[list[str]] = []
        self.lines: list[int] = []
        self.truths: set[int] = set()
        self.digits: set[int] = set()

    def add(self, row: list[str], line: int) -> bool:
        """Add a row and return True if it completed a chunk; empty lines are skipped."""
        width = len(self.table.header)
        if row and len(row) != width:
            self.errors.add(f"another number of cells; each row must have {width}", f"line {line}: {len(row)}")
        elif row:
            self.rows.append(row)
            self.lines.append(line)
        full = len(self.rows) == ROWS
        if full:
            self._take()
        return full

    def examples(self) -> Examples:
        """Return the examples, and record columns that mix truth values and numbers."""
        self._take()
        mixed = sorted(self.truths & self.digits)
        names = (f"column {self.table.features[j]}" for j in mixed)
        self.errors.add_many("true or false among numbers", len(mixed), names)
        return self.table.examples()

    def _take(self) -> None:
        if not self.rows:
            return
        first = len(self.table.places)
        self.table.add_names(lambda column: [row[column] for row in self.rows], self.lines)
        chosen = [[row[i] for i in self.table.inputs] for row in self.rows]
        self.rows, self.lines = [], []
        values = _plain_numbers(chosen)
        if values is None:
            values, known = self._cell_by_cell(chosen, self.table.cell(first))
        else:
            known = np.zeros(values.shape, dtype=np.bool_)
            self.digits.update(range(values.shape[1]))
        self.table.batches.add(values, self.table.cell(first), known)

    def _cell_by_cell(
        self, rows: Sequence[Sequence[str]], where: Callable[[int, int], str]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        values = np.zeros((len(rows), len(rows[0])))
        known = np.zeros(values.shape, dtype=np.bool_)
        for i, j in np.ndindex(values.shape):
            text = rows[i][j]
            found, truth = number(text), TRUTHS.get(text.strip().lower())
            fault = _fault(text, found, truth)
            if fault is not None:
                known[i, j] = True
                self.errors.add(fault, f"{where(i, j)}: {text!r}" if text.strip() else where(i, j))
            elif found is not None:
                values[i, j] = found
                self.digits.add(j)
            elif truth is not None:
                values[i, j] = truth
                self.truths.add(j)
        return values, known


def _fault(text: str, found: float | None, truth: float | None) -> str | None:
    if found is None and truth is None:
        return "value missing" if text.strip() in MISSING else "not a number"
    if found is not None and abs(found) > EXACT and is_whole(text):
        return "integer beyond 2^53, which cannot be a feature"
    return None


def _plain_numbers(rows: Sequence[Sequence[str]]) -> NDArray[np.float64] | None:
    """Return the numbers in rows of text; None if each cell needs a check, because float() accepts more forms.

    Numpy also drops NUL characters at the end of a text.
    """
    joined = "".join(text for row in rows for text in row)
    if "_" in joined or "\0" in joined or not joined.isascii():
        return None
    try:
        values = np.array(rows).astype(np.float64)
    except ValueError:
        return None
    return None if (np.abs(values) > EXACT).any() else values
