"""Partition: a source's examples assigned to clients (``fedloom.data.assignment``), as a folder on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedloom.core.files import PRIVATE_FOLDER, fill, read_file, sync
from fedloom.core.words import pluralize
from fedloom.data import datasets
from fedloom.data.apportion import input_digests
from fedloom.data.assignment import Assignment, PartitionSettings, assign_examples, draw_means, grouped_by_target
from fedloom.data.datasets import Dataset, RawDataset
from fedloom.data.folders import data_root, locked, published
from fedloom.data.manifest import (
    FIX,
    SPLITS,
    VERSION,
    ClientEntry,
    Manifest,
    read_manifest,
    read_shard,
    shard_path,
)
from fedloom.data.moments import CHUNK, pixel_sums
from fedloom.data.schemes import MeansScheme
from fedloom.data.spec import (
    DataSpec,
    InputSpec,
    Normalization,
    RawInputs,
    named_arrays,
    shard_tensors,
    unnamed,
)
from fedloom.errors import DataError

log = logging.getLogger("fedloom.data")

ASSIGNMENT = 2
"""Version of the assignment and normalization rules; raise it with every change to either."""

NOTES, NOTES_VERSION = "notes.json", 1
"""File beside the manifest, present if there are notes: its version, and sentences."""


def partition_dataset(
    dataset: str | Dataset, settings: PartitionSettings, *, root: Path | str | None = None, fix: bool = False
) -> Path:
    """Return the folder of a partition; create it unless an earlier call with the same inputs did.

    The folder, ``<root>/partitions/<dataset>-<key>``, is named by a hash of everything that determines its content,
    and is created atomically. Its bytes depend on nothing else.

    Raise ExperimentError, naming the key, if the settings cannot be satisfied; DataError if the data set is missing or
    damaged.

    Parameters
    ----------
    dataset
        A source that is on disk (``fedloom data fetch``), or its name.
    root
        Data root; see :func:`~fedloom.data.folders.data_root`.
    fix
        Check an existing folder against its hashes, and recreate it if it is damaged. Otherwise an existing folder is
        returned unchecked, and damage is an error when it is read.
    """
    source = datasets.find_dataset(dataset) if isinstance(dataset, str) else dataset
    settings.check(source)
    checksums = datasets.checksums(source, root)
    folder = _folder(source, checksums, settings, root)
    if fix or not folder.exists():
        _make(folder, source, checksums, settings, root, fix)
    for note in notes_of(folder):
        log.warning("%s", note)
    return folder


def made_partition(source: Dataset, settings: PartitionSettings, root: Path | str | None = None) -> Path | None:
    """Return the folder that :func:`partition_dataset` makes if it is on this machine, else None."""
    try:
        folder = _folder(source, datasets.checksums(source, root), settings, root)
    except DataError:  # the data set is not here
        return None
    return folder if folder.exists() else None


def notes_of(folder: Path) -> tuple[str, ...]:
    """Return the notes on a partition: owners or examples left out, and repeated inputs.

    Raise DataError if the file is damaged, or of another version.
    """
    path = folder / NOTES
    if not path.exists():
        return ()
    try:
        document = json.loads(read_file(path))
        version, notes = document["version"], tuple(map(str, document["notes"]))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error!r})", hint=FIX) from error
    if version != NOTES_VERSION:
        raise DataError(f"{path} has version {version}; this FedLoom reads version {NOTES_VERSION}", hint=FIX)
    return notes


def _make(
    folder: Path,
    source: Dataset,
    checksums: Mapping[str, str],
    settings: PartitionSettings,
    root: Path | str | None,
    fix: bool,
) -> None:
    """Create a partition, unless an intact one already exists."""
    scheme = settings.scheme
    with locked(folder):
        if folder.exists() and not (fix and _is_damaged(folder)):
            return
        if isinstance(scheme, MeansScheme):
            source, official, assignment = draw_means(source, scheme, settings)
        else:
            official = datasets.load_dataset(source, root)
            groups, classified = scheme.groups(source.spec), source.spec.targets is None
            labelled = official if classified else grouped_by_target(official, groups)
            assignment = assign_examples(labelled, groups, settings, source.name)
            notes = (*_notes_on_trained_inputs(source.name, official, assignment), *assignment.notes)
            assignment = replace(assignment, notes=notes)
        with published(folder) as staging:
            write(staging, source, checksums, official, settings, assignment)


def _notes_on_trained_inputs(name: str, official: RawDataset, assignment: Assignment) -> list[str]:
    """Return a note if inputs occur in training and are held out, in data whose equal inputs are not kept together.

    Windows of a text are left out, since they repeat like the text.
    """
    if official.equal is not None or (official.owners is not None and official.owners.overlap):
        return []
    digests = [*input_digests(official.train.inputs), *input_digests(official.test.inputs)]
    of_split = {split: [digests[i] for mine in assignment.examples[split] for i in mine.tolist()] for split in SPLITS}
    trained = set(of_split["train"])
    validation, test = (sum(each in trained for each in of_split[split]) for split in SPLITS[1:])
    if not validation + test:
        return []
    return [
        f"{validation:,} validation and {pluralize(test, 'test example')} have inputs that clients also train on: "
        f"{name} repeats inputs, and they stay where its split and the scheme put them, so that results compare with "
        "published ones. Only own data keep equal inputs in one split"
    ]


def find_partition(manifest: Manifest, root: Path | str | None = None) -> Path | None:
    """Return the folder of the partition in a data root that has this manifest; None if there is none."""
    for path in sorted((data_root(root) / "partitions").glob(f"{manifest.dataset}-*/partition.json")):
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == manifest.fingerprint:
            return path.parent
    return None


def take_positions(official: RawDataset, positions: NDArray[np.int64]) -> tuple[RawInputs, NDArray[Any]]:
    """Return inputs and targets at ascending positions in the official train, then test examples."""
    first_test = len(official.train)
    parts = (
        (official.train, positions[positions < first_test]),
        (official.test, positions[positions >= first_test] - first_test),
    )
    inputs = {
        name: np.concatenate([named_arrays(pool.inputs)[name][rows] for pool, rows in parts])
        for name in named_arrays(official.train.inputs)
    }
    return unnamed(inputs), np.concatenate([pool.labels[rows] for pool, rows in parts])


def write(
    folder: Path,
    source: Dataset,
    checksums: Mapping[str, str],
    official: RawDataset,
    settings: PartitionSettings,
    assignment: Assignment,
) -> Manifest:
    """Write a manifest and one shard per client into an empty folder, and return the manifest.

    A shard is a safetensors file with ``train_x`` [n, *input_shape] (uint8; features float32; integers int64), or
    ``train_x.NAME`` of each named input; ``train_y``, the targets, unless there are none (of classes: [n] int64); and
    the same for validation and test. ``checksums`` are the SHA-256 of the source's files, hex, by name.
    """
    spec, shards = source.spec, folder / "shards"
    shards.mkdir(PRIVATE_FOLDER)
    width = max(4, len(str(len(assignment.seen) - 1)))
    entries = []
    shift = None if isinstance(settings.scheme, MeansScheme) else settings.scheme.shift
    groups = None if shift is None else shift.deal(len(assignment.seen), settings.seed)
    for client, (is_seen, owner) in enumerate(zip(assignment.seen, assignment.owners, strict=True)):
        tensors: dict[str, NDArray[Any]] = {}
        counts: dict[str, tuple[int, ...]] = {}
        for split in SPLITS:
            inputs, labels = take_positions(official, assignment.examples[split][client])
            if shift is not None and groups is not None:
                assert not isinstance(inputs, Mapping), "checked: a shift needs a single input"
                inputs, labels = shift.shifted(inputs, labels, groups[client], spec.classes, settings.seed)
            tensors |= shard_tensors(split, inputs, labels if spec.outputs else None)
            counts[split] = ()
            if spec.classes:
                counts[split] = tuple(np.bincount(labels, minlength=spec.classes).tolist())
        # Without metadata: safetensors writes several metadata keys in arbitrary order.
        content = safetensors.numpy.save(tensors)
        name = f"client-{client:0{width}d}"
        # No fsync: a shard truncated by a power cut does not match its hash, and is detected.
        fill(shard_path(folder, name), content, durably=False, private=True)
        digest = hashlib.sha256(content).hexdigest()
        train_size, validation_size, test_size = (len(assignment.examples[split][client]) for split in SPLITS)
        entries.append(ClientEntry(name, bool(is_seen), train_size, validation_size, test_size, counts, digest, owner))
    sync(shards)
    if assignment.notes:
        fill(folder / NOTES, json.dumps({"version": NOTES_VERSION, "notes": assignment.notes}).encode())
    pool = assignment.measured if settings.normalization == "seen" else assignment.training_pool
    if source.synthetic:  # kept as drawn
        normalization = Normalization.identity(spec.numbers)
    else:
        normalization = measure_normalization(official, spec, pool)
    manifest = Manifest(
        version=VERSION,
        dataset=source.name,
        spec=spec.with_normalization(normalization),
        scheme=settings.scheme.model_dump(mode="json"),
        seed=settings.seed,
        held_out_fraction=settings.held_out_fraction,
        validation_fraction=settings.validation_fraction,
        source_sha256=dict(checksums),
        clients=tuple(entries),
        reserved=assignment.reserved,
        shift_groups=groups,
        measured_on=settings.normalization,
    )
    fill(folder / "partition.json", manifest.to_json().encode())
    return manifest


def measure_normalization(official: RawDataset, spec: DataSpec, pool: NDArray[np.int64]) -> Normalization:
    """Return mean and standard deviation of each channel (of pixels scaled to 0 ... 1), feature and target.

    They are measured on the training examples at ascending positions. The sums are exact, so that they are the same on
    every machine.
    """
    parts = [_input_moments(official, each, pool, name) for name, each in spec.inputs.items()]
    if spec.targets is not None and spec.targets.numbers:
        parts.append(_row_moments(spec.targets.rows(take_positions(official, pool)[1])))
    moments = [each for part in parts for each in part]
    # A constant channel or feature carries no information; dividing by 1 keeps it at zero.
    return Normalization(tuple(mean for mean, _ in moments), tuple(std or 1.0 for _, std in moments))


def _input_moments(
    official: RawDataset, spec: InputSpec, pool: NDArray[np.int64], name: str
) -> list[tuple[float, float]]:
    if spec.kind == "tokens":
        return []
    if spec.kind == "pixels":
        pieces = (take_positions(official, pool[start : start + CHUNK])[0] for start in range(0, len(pool), CHUNK))
        sums = pixel_sums(named_arrays(images)[name] for images in pieces)
        return [(first / n / 255, (n * second - first * first) ** 0.5 / n / 255) for n, first, second in sums]
    return _row_moments(spec.rows(named_arrays(take_positions(official, pool)[0])[name]))


def _row_moments(values: NDArray[Any]) -> list[tuple[float, float]]:
    """Return mean and standard deviation of each row of ``[numbers, n]``."""
    rows = [row.astype(np.float64) for row in values]
    means = [math.fsum(row) / len(row) for row in rows]
    pairs = zip(rows, means, strict=True)
    return [(mean, math.sqrt(math.fsum((row - mean) ** 2) / len(row))) for row, mean in pairs]


def _folder(
    source: Dataset, checksums: Mapping[str, str], settings: PartitionSettings, root: Path | str | None
) -> Path:
    """Return the folder of a partition, named by a hash of everything that determines its content."""
    inputs = {
        "version": VERSION,
        "dealing": ASSIGNMENT,
        "source": [source.name, dict(checksums)],
        "scheme": settings.scheme.model_dump(mode="json"),
        "seed": settings.seed,
        "held_out_fraction": settings.held_out_fraction,
        "validation_fraction": settings.validation_fraction,
    }
    if settings.normalization != "seen":
        inputs["normalization"] = settings.normalization
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]
    return data_root(root) / "partitions" / f"{source.name}-{key}"


def _is_damaged(folder: Path) -> bool:
    """Return True if a partition on disk does not match its manifest, and log the error."""
    try:
        notes_of(folder)
        for client in read_manifest(folder).clients:
            read_shard(folder, client)
    except DataError as error:
        log.warning("%s; creating the partition again", str(error).splitlines()[0])
        return True
    return False
