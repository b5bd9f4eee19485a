"""Local data sets: a folder of images, a table, or arrays, with or without owners.

The readers that pack a client's data (:mod:`fedloom.data.pack`) read them once. The data root keeps each as one file of
examples and a card, named by a hash of the content: equal examples are the same data set, regardless of their origin.
Afterwards such a data set is a source like any other.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from fedloom.core.files import fill, sync, write_atomically
from fedloom.core.home import expanded
from fedloom.core.keyed import make_rng
from fedloom.core.settings import Settings
from fedloom.core.words import first_of, parsed_json, pluralize
from fedloom.data.apportion import draw_splits, equal_inputs
from fedloom.data.datasets.base import DataFile, Dataset, Owners, Pool, RawDataset
from fedloom.data.folders import data_root, files_below, locked, naming_owner, published, read_stored, text_fault
from fedloom.data.own import Words
from fedloom.data.pack.arrays import array_columns, class_names, read_arrays, read_medmnist
from fedloom.data.pack.examples import Columns, Examples, Reader, Request, TextColumn, ValidationErrors
from fedloom.data.pack.images import HOW_TO_READ, is_medical, read_images
from fedloom.data.pack.packer import examples_of
from fedloom.data.pack.saved import read_saved
from fedloom.data.pack.tables import PARQUET, read_csv, read_frame, read_parquet
from fedloom.data.spec import (
    ChannelAxis,
    DataSpec,
    RawInputs,
    input_key,
    named_arrays,
    shard_tensors,
    unnamed,
)
from fedloom.errors import DataError, ExperimentError
from fedloom.tasks.names import TaskName

if TYPE_CHECKING:
    from pandas import DataFrame

LOCAL = ("arrays", "folder", "huggingface", "medmnist", "table")
"""Values of ``data.dataset`` for local data sets."""

CARD, EXAMPLES = "dataset.json", "examples.safetensors"
TEST_FRACTION = 0.2
"""Fraction of the examples used for testing, where neither the source nor a scheme sets a test split."""

READERS: Mapping[str, Mapping[str, Reader]] = {
    "arrays": {".npz": read_arrays, ".safetensors": read_arrays},
    "folder": {"/": read_images},
    "huggingface": {"/": read_saved},
    "medmnist": {".npz": read_medmnist},
    "table": {".csv": read_csv, **dict.fromkeys(PARQUET, read_parquet)},
}
"""Readers by data set and file extension; ``/`` stands for a folder."""

WITH_TEXT = ("huggingface", "table")
"""Data sets whose columns may be texts."""

READ = 4
"""Version of the reading rules; sources read under another version are read again."""

COLUMNS = (
    "name the column of labels at data.source.label, of owners at data.source.client, and of splits at "
    "data.source.split; all others are features"
)


class LocalFiles(Settings):
    """Location of a local data set, and how to read it."""

    path: str = Field(
        min_length=1,
        description="The folder of images, CLASS/NAME.png, or with train/ and test/ above, or images/NAME.png and "
        "masks/NAME.png; the .csv or .parquet file; the .npz or .safetensors file "
        "with x and y; MedMNIST's .npz file; or the folder saved by datasets. A relative path starts from the current "
        "folder; a run records it as an absolute one.",
    )
    client: str | None = Field(
        default=None,
        min_length=1,
        description="Owner of each example: a column of the table, or an array; for a folder, `folder`: the outermost "
        "folders, OWNER/CLASS/NAME.png. Null: no owners.",
    )
    label: str = Field(default="label", min_length=1, description="Column with the labels.")
    targets: Words = Field(
        default=(),
        description="Columns of a table with the targets, in place of `label`: numbers, or 0 and 1 for each of several "
        "labels.",
    )
    task: TaskName | None = Field(
        default=None,
        description="Task of the targets: classification, multilabel, regression, segmentation or next_token. Null: "
        "inferred from the data (docs/data.md).",
    )
    outputs: int | None = Field(
        default=None,
        ge=1,
        description="Minimum number of classes of a pixel, or of tokens, for data that may lack some; null: as many "
        "as the data have.",
    )
    integers: bool | Words = Field(
        default=False,
        description="For a table: true if all input columns are integers to keep unchanged, such as category codes; "
        "or the names of those columns.",
    )
    text: TextColumn | None = Field(
        default=None,
        description="For table and huggingface: the column of texts, and the tokenizer that turns them into integers: "
        "{column, tokenizer, length, padding, truncation, mask}; null: none.",
    )
    channel_axis: ChannelAxis = Field(
        default="first",
        description="For arrays: axis of an input along which features are standardized, first or last.",
    )
    split: str | None = Field(
        default=None, min_length=1, description="Column with train, validation or test; null: none."
    )
    resize: bool = Field(default=False, description="Resize images of another size to the first one's.")

    def request(self, **options: Any) -> Request:
        """Return the reading options; ``options`` are others than the keys of this section."""
        keys = {key: value for key, value in self if key in Request.__dataclass_fields__}
        return Request(**{**keys, **options})


log = logging.getLogger("fedloom.data")


@dataclass(frozen=True)
class DatasetCard:
    """Description of a stored data set: everything except its examples."""

    version: Literal[2]
    spec: DataSpec
    owners: tuple[str, ...] | None
    divided: bool
    size: int
    sha256: str

    def to_json(self) -> str:
        """Return the card as JSON; its hash names the data set."""
        return json.dumps(_CARD.dump_python(self, mode="json"), sort_keys=True, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> DatasetCard:
        """Read a card; raise DataError if it is damaged or of another version."""
        hint = f"remove {path.parent} to recreate it"
        content = read_stored(path, "the card of a data set is missing", hint)
        if not path.parent.name.endswith(_named_by(content)):
            raise DataError(f"{path} is damaged: its folder is not named by its content", hint=hint)
        try:
            return _CARD.validate_json(content)
        except ValidationError as error:
            raise DataError(f"{path} is damaged: {text_fault(error)}", hint=hint) from error


_CARD = TypeAdapter(DatasetCard)


def local_source(dataset: str, files: LocalFiles, root: Path | str | None) -> Dataset:
    """Return a local data set, one of :data:`LOCAL`, as a source; read it unless it has been read before.

    Raise ExperimentError if the path does not exist or holds something else, or a package needed to read it is not
    installed; DataError if the content is invalid: it lists all errors, with counts. Nothing is kept then.
    """
    path = expanded(files.path)
    if (path / CARD).is_file():  # the folder of a data set that was stored before
        kept_source = _source(path.parent, path.name)
        if files.task not in (None, kept_source.spec.task):
            raise ExperimentError(
                f"data.source.task: the examples at {path} are for {kept_source.spec.task} (got {files.task}); store "
                "them again with that task, or leave it out",
                key="data.source.task",
                found=files.task,
                allowed=[kept_source.spec.task],
            )
        return kept_source
    if files.text is not None and dataset not in WITH_TEXT:
        raise ExperimentError(
            f"data.source.text is for {' and '.join(WITH_TEXT)}; leave it out for {dataset}.",
            key="data.source.text",
            found=dataset,
            allowed=WITH_TEXT,
        )
    reader = _reader(dataset, path)
    home = data_root(root) / "datasets"
    record = home / ".read" / f"{_stamp(dataset, files, path)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError, DataError):  # not read yet, or removed since
        recorded = parsed_json(record.read_bytes())
        return _source(home, recorded["name"], tuple(f"{path}: {note}" for note in recorded["notes"]))
    errors = ValidationErrors(str(path))
    request = files.request(keys="data.source.")
    try:
        examples = examples_of(reader(path, request, errors, lambda description, count, total: None), request, errors)
        errors.refuse()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    except DataError as error:
        raise error.with_hint(COLUMNS if dataset == "table" else None) from error
    name = keep(dataset, examples, str(path), root)
    log_targets(examples, str(path))
    if examples.features is not None:
        log.info("%s: features %s", path, first_of(examples.features))
    with naming_owner(record):
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(record, json.dumps({"name": name, "notes": examples.notes}).encode())
    return _source(home, name, tuple(f"{path}: {note}" for note in examples.notes))


def log_notes(notes: Sequence[str]) -> None:
    """Log changes to examples that their owner should know."""
    for note in notes:
        log.warning("%s", note)


def log_targets(examples: Examples, source: str) -> None:
    """Log the task, unless the targets are classes, and the inputs that stay integers."""
    if (targets := examples.spec.targets) is not None:
        log.info("%s: task %s, targets %s, %d outputs", source, targets.task, list(targets.shape), targets.outputs)
    for name, spec in examples.spec.inputs.items():
        if spec.kind == "integers":
            log.info("%s: %s: integers from 0 to %d", source, f"x.{name}" if name else "x", (spec.high or 1) - 1)


def keep(dataset: str, examples: Examples, where: str, root: Path | str | None) -> str:
    """Store a data set, which errors call ``where``, in the data root and return its name there.

    Raise DataError if there are no labelled examples, or none for training or testing.
    """
    n = len(examples)
    if not n or examples.y is None:
        raise DataError(f"{where}: it has {n} examples; give labelled examples")
    test = _test_rows(examples)
    if test.all() or not test.any():
        part_name = "training" if test.all() else "testing"
        raise DataError(f"{where}: it has {pluralize(n, 'example')}, but none for {part_name}")
    names = None if examples.owners is None else tuple(sorted(set(examples.owners)))
    place = {name: i for i, name in enumerate(names or ())}
    owners = np.array([place[owner] for owner in examples.owners or ()], dtype=np.int64)
    tensors: dict[str, NDArray[Any]] = {}
    for part, selected in (("train", ~test), ("test", test)):
        tensors |= shard_tensors(part, examples.chosen(selected), examples.y[selected])
        if names is not None:
            tensors[f"{part}_owner"] = owners[selected]
    content = safetensors.numpy.save(tensors)
    is_split = examples.split is not None
    digest = hashlib.sha256(content).hexdigest()
    card = DatasetCard(
        version=2,
        spec=examples.spec,
        owners=names,
        divided=is_split,
        size=len(content),
        sha256=digest,
    )
    text = card.to_json()
    name = f"{dataset}{_named_by(text.encode())}"
    folder = data_root(root) / "datasets" / name
    with locked(folder):
        if not folder.exists():
            with published(folder) as staging:
                fill(staging / EXAMPLES, content)
                fill(staging / CARD, text.encode())
                sync(staging)
    return name


def _named_by(content: bytes) -> str:
    """Return the suffix of a stored data set's name, a hash of its card."""
    return f"-{hashlib.sha256(content).hexdigest()[:12]}"


def _source(home: Path, name: str, notes: tuple[str, ...] = ()) -> Dataset:
    card = DatasetCard.read(home / name / CARD)

    def read(contents: Mapping[str, bytes]) -> RawDataset:
        tensors = safetensors.numpy.load(contents[EXAMPLES])
        train, test = (_pool(tensors, part, card.spec) for part in ("train", "test"))
        owners = None if card.owners is None else Owners(card.owners, divided=card.divided)
        pairs = zip(named_arrays(train.inputs).items(), named_arrays(test.inputs).values(), strict=True)
        columns = {name: np.concatenate([one, other]) for (name, one), other in pairs}
        return RawDataset(train, test, owners, equal_inputs(unnamed(columns)))

    return Dataset(
        name=name,
        title=name,
        spec=card.spec,
        licence="its owner's",
        files=(DataFile(EXAMPLES, card.size, card.sha256),),
        read=read,
        at=home / name,
        notes=notes,
    )


def _pool(tensors: Mapping[str, NDArray[Any]], part: str, spec: DataSpec) -> Pool:
    x = {name: tensors[input_key(part, name)] for name in spec.inputs}
    return Pool(unnamed(x), tensors[f"{part}_y"], tensors.get(f"{part}_owner"))


def _reader(dataset: str, path: Path) -> Reader:
    readers = READERS[dataset]
    folders = {"folder": "a folder of images", "huggingface": "a folder saved by datasets (save_to_disk)"}
    files = f"a file that ends in {', '.join(end for end in readers if end != '/')}"
    reader = folders.get(dataset, files)
    if not path.exists():
        raise ExperimentError(f"data.source.path: {path.absolute()} does not exist; give {reader}")
    suffix = "/" if path.is_dir() else path.suffix.lower() if path.is_file() else ""
    if suffix not in readers:
        hint = HOW_TO_READ if is_medical(path) else None
        raise ExperimentError(
            f"data.source.path: {path} is not of the dataset type {dataset}; give {reader}", hint=hint
        )
    return readers[suffix]


def _stamp(dataset: str, files: LocalFiles, path: Path) -> str:
    """Return a digest that changes whenever the files at the path or the reading options may have changed."""
    digest = hashlib.sha256(json.dumps([READ, dataset, files.model_dump(), str(path.resolve())]).encode())
    paths = [path] if files.text is None else [path, expanded(files.text.tokenizer)]
    for file in (each for root in paths for each in (files_below(root) if root.is_dir() else [root])):
        if not file.exists() and not file.is_symlink():
            continue
        status = file.stat() if file.exists() else file.lstat()  # a broken link has only its own status
        facts = [str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        digest.update(json.dumps(facts).encode())
    return digest.hexdigest()


def _test_rows(examples: Examples) -> NDArray[np.bool_]:
    """Return the examples for testing, ``[n]`` bool, as marked in the source, else a fraction of each class.

    Equal inputs go to the same side.
    """
    assert examples.y is not None
    if examples.split is not None:
        return np.asarray(examples.split == 2)
    rng = make_rng(1, "local", "test")
    split = draw_splits(examples.strata, equal_inputs(examples.x), {2: TEST_FRACTION}, lambda place: rng)
    return np.asarray(split == 2)


def of_arrays(
    parts: Sequence[tuple[str | None, Mapping[str, RawInputs]]],
    classes: Sequence[str] | None,
    root: Path | str | None,
    request: Request | None = None,
) -> Path:
    """Store arrays as a data set and return its folder, which ``data.source.path`` may name.

    Parameters and errors are those of :func:`~fedloom.data.pack.arrays.array_columns`; ``request`` has the task,
    outputs and channel axis (None: inferred).
    """
    names = None if classes is None else class_names(classes)
    return _keep_in_memory("the arrays", lambda *to: array_columns(parts, names, *to), request or Request(), root)


def of_frame(frame: DataFrame, request: Request, root: Path | str | None) -> Path:
    """Store the rows of a DataFrame as a data set and return its folder, which ``data.source.path`` may name.

    Raise DataError if the frame is invalid: it lists all errors, with a count of each kind.
    """
    return _keep_in_memory("the frame", lambda *to: read_frame(frame, *to), request, root)


def _keep_in_memory(
    source: str, reader: Callable[[Request, ValidationErrors], Columns], request: Request, root: Path | str | None
) -> Path:
    """Store in-memory examples, log the notes on them, and return their folder."""
    errors = ValidationErrors(source)
    examples = examples_of(reader(request, errors), request, errors)
    errors.refuse()
    folder = data_root(root) / "datasets" / keep("arrays", examples, source, root)
    log_notes([f"{source} ({folder.name}): {note}" for note in examples.notes])
    log_targets(examples, source)
    return folder
