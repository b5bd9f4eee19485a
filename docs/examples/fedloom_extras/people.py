"""Measurements of people, in a CSV file: the columns ``person`` and ``label``, then nine features."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedloom.data.datasets import Dataset, Owners, Pool, RawDataset
from fedloom.data.datasets.base import OwnFiles
from fedloom.data.spec import DataSpec
from fedloom.errors import DataError

CLASS_NAMES = tuple(f"vowel-{i}" for i in range(11))
FEATURES = 9


def read(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the rows as examples of their persons. The first half of each person's rows is for training."""
    inputs, labels, owners, first = [], [], [], []
    table = list(csv.DictReader(io.StringIO(contents["people.csv"].decode())))
    rows = Counter(row["person"] for row in table)
    names, met = sorted(rows), Counter[str]()
    for number, row in enumerate(table, start=2):
        person, label = row.pop("person"), row.pop("label")
        if label not in CLASS_NAMES:
            raise DataError(f"people.csv, line {number}: label {label!r} is none of {', '.join(CLASS_NAMES)}")
        try:
            inputs.append([float(value) for value in row.values()])
        except ValueError as error:
            raise DataError(f"people.csv, line {number}: {error}; give numbers") from error
        labels.append(CLASS_NAMES.index(label))
        owners.append(names.index(person))
        first.append(met[person] < rows[person] // 2)
        met[person] += 1
    x, y, whose = np.array(inputs, dtype=np.float32), np.array(labels), np.array(owners)
    train, test = (Pool(x[part], y[part], whose[part]) for part in (np.array(first), ~np.array(first)))
    return RawDataset(train, test, Owners(tuple(names), divided=True))


def names(folder: Path) -> tuple[str, ...]:
    """Return the files of a folder that belong to this source."""
    return ("people.csv",) if (folder / "people.csv").exists() else ()


PEOPLE = Dataset(
    name="people",
    title="People",
    spec=DataSpec.single("features", (FEATURES,), CLASS_NAMES),
    licence="your own",
    read=read,
    own=OwnFiles("people.csv with the columns person, label and nine features", names),
)
