"""Packing: turn an owner's images, table, arrays or text into one client's folder.

A reader for each format returns :class:`~fedloom.data.pack.examples.Columns`; :func:`pack` converts, splits and writes
them, atomically.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedloom.core.files import fill, storing, sync
from fedloom.core.keyed import make_rng
from fedloom.core.words import pluralize
from fedloom.data.apportion import draw_splits, equal_inputs, held_out
from fedloom.data.folders import published
from fedloom.data.manifest import CLIENT_ID, SPLITS
from fedloom.data.moments import moments_of
from fedloom.data.own import CARD, CARD_VERSION, SHARD, ClientCard
from fedloom.data.pack.arrays import read_arrays
from fedloom.data.pack.examples import Examples, OnProgress, Reader, Request, ValidationErrors
from fedloom.data.pack.images import HOW_TO_READ, is_medical, read_images
from fedloom.data.pack.packer import examples_of
from fedloom.data.pack.tables import PARQUET, read_csv, read_parquet
from fedloom.data.pack.texts import read_characters
from fedloom.data.spec import shard_tensors
from fedloom.errors import DataError, ExperimentError, argument

FORMATS: Mapping[str, tuple[str, Reader]] = {
    ".csv": ("csv", read_csv),
    **dict.fromkeys(PARQUET, ("parquet", read_parquet)),
    ".npz": ("npz", read_arrays),
    ".safetensors": ("safetensors", read_arrays),
    ".txt": ("text", read_characters),
}
"""Format and reader by file extension; a folder holds images."""


@dataclass(frozen=True)
class PackSettings:
    """Packing settings of a client: its id, reading options, and how its examples are split at random.

    Without an id, the client has the name of the source without its extension. ``test_fraction`` is that of all
    examples, ``validation_fraction`` that of the rest.
    """

    id: str | None = None
    request: Request = field(default_factory=Request)
    test_fraction: float = 0.2
    validation_fraction: float = 1 / 6
    seed: int = 1

    @property
    def fractions(self) -> Mapping[int, float]:
        """Fraction drawn for each split, by its position in ``SPLITS``, in the order drawn."""
        return {2: self.test_fraction, 1: self.validation_fraction}


@dataclass(frozen=True)
class PackedClient:
    """Packed client, and notes on changes to its examples that their owner should know."""

    card: ClientCard
    notes: tuple[str, ...]


def pack(
    source: Path, out: Path, settings: PackSettings, on_progress: OnProgress = lambda description, count, total: None
) -> PackedClient:
    """Pack a client's examples; the same source and settings produce the same bytes.

    Raise ExperimentError if an option is not allowed, or ``out`` exists; DataError, which lists all errors with a count
    of each kind, if the source is invalid. Nothing is written then.

    Parameters
    ----------
    source
        A folder of images, or a CSV, Parquet, npz, safetensors or text file.
    out
        A new folder, readable only by its owner.
    on_progress
        Progress callback.
    """
    name = settings.id if settings.id is not None else source.resolve().name.removesuffix(source.suffix)
    _check_arguments(name, out, settings)
    form, reader = _reader(source)
    errors = ValidationErrors(str(source))
    try:
        examples = examples_of(reader(source, settings.request, errors, on_progress), settings.request, errors)
    except OSError as error:
        raise DataError(f"{source} cannot be read ({error.strerror or error})") from error
    errors.refuse()
    if not len(examples):
        raise DataError(f"{source} has no examples")
    needs = settings.request.needs
    if needs is not None:
        skip = ("targets",) if examples.y is None else ()
        if (fault := examples.spec.mismatch(needs, settings.request.needed_by, exact=True, skip=skip)) is not None:
            raise DataError(f"{source}: {fault}")
    on_progress("checking", 0, None)
    split, notes = _split_positions(examples, settings, name, errors)
    tensors, counts = _tensors(examples, split)
    content = safetensors.numpy.save(tensors)  # without metadata, whose order may vary
    split_settings = {"seed": settings.seed, "test_fraction": settings.test_fraction}
    split_settings["validation_fraction"] = settings.validation_fraction
    train, validation, test = (int(np.count_nonzero(split == place)) for place in range(len(SPLITS)))
    training = None if examples.y is None else examples.y[split == 0]
    card = ClientCard(
        version=CARD_VERSION,
        id=name,
        spec=examples.spec,
        labelled=examples.y is not None,
        train=train,
        validation=validation,
        test=test,
        class_counts=counts,
        sha256=hashlib.sha256(content).hexdigest(),
        moments=moments_of(examples.chosen(split == 0), training, examples.spec),
        division={"given": True} if examples.split is not None else split_settings,
        source=form,
        features=examples.features,
    )
    on_progress("writing", 0, None)
    with storing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with published(out) as staging:
        staging.chmod(0o700)
        for file, whole in ((SHARD, content), (CARD, card.to_json().encode())):
            fill(staging / file, whole)
            (staging / file).chmod(0o600)
        sync(staging)
    return PackedClient(card, (*examples.notes, *notes))


def _check_arguments(name: str, out: Path, settings: PackSettings) -> None:
    """Reject a client id, fractions or a folder that packing cannot use."""
    if not CLIENT_ID.fullmatch(name):
        raise ExperimentError(
            f"{argument('id')} must be up to 128 letters, digits, '.', '_' and '-' (got {name!r}).",
            key="id",
            found=name,
        )
    for option in ("test_fraction", "validation_fraction"):
        if not 0 < getattr(settings, option) < 1:
            value = getattr(settings, option)
            raise ExperimentError(
                f"{argument(option)} must be between 0 and 1 (got {value:g}).", key=option, found=value
            )
    if out.exists():
        raise ExperimentError(f"{argument('out')} must be a new folder, and {out} exists.", key="out", found=out)


def _reader(source: Path) -> tuple[str, Reader]:
    if source.is_dir():
        return "images", read_images
    if not source.exists():
        raise DataError(f"{source} does not exist")
    if source.suffix.lower() not in FORMATS or not source.is_file():
        raise ExperimentError(
            f"{source} must be a folder of images, or a file that ends in {', '.join(FORMATS)}",
            hint=HOW_TO_READ if is_medical(source) else None,
        )
    return FORMATS[source.suffix.lower()]


def _split_positions(
    examples: Examples, settings: PackSettings, name: str, errors: ValidationErrors
) -> tuple[NDArray[np.int64], list[str]]:
    """Return each example's position in ``SPLITS``, ``[n]``, and notes on the split."""
    notes: list[str] = []
    if examples.overlap:
        split = _by_time(len(examples), settings, examples.overlap)
        left_out = int(np.count_nonzero(split < 0))
        notes.append(f"{left_out} windows left out, so that splits do not share characters")
    else:
        group = equal_inputs(examples.x)
        if examples.split is None:
            split = draw_splits(
                examples.strata,
                group,
                settings.fractions,
                lambda place: make_rng(settings.seed, "pack", name, SPLITS[place]),
            )
            copies = len(group) - len(np.unique(group))
            if copies:
                repeat = pluralize(copies, "example repeats an earlier input", "examples repeat an earlier input")
                notes.append(f"{repeat}; equal inputs stay in one split")
        else:
            split = examples.split
            _refuse_shared(examples, group, split, errors)
    empty = [SPLITS[place] for place in range(len(SPLITS)) if not (split == place).any()]
    if empty:
        raise DataError(
            f"{errors.source}: none of {pluralize(len(examples), 'example')} is for {', '.join(empty)}; each split "
            "needs its own inputs"
        )
    return split, notes


def _by_time(count: int, settings: PackSettings, overlap: int) -> NDArray[np.int64]:
    """Hold out the last windows, with a gap before each split; -1 marks windows in a gap."""
    split = np.full(count, -1, dtype=np.int64)
    end = count
    for place, fraction in settings.fractions.items():
        size = held_out(fraction, end)
        split[end - size : end] = place
        end = max(end - size - overlap, 0)
    split[:end] = 0
    return split


def _refuse_shared(
    examples: Examples, group: NDArray[np.int64], split: NDArray[np.int64], errors: ValidationErrors
) -> None:
    """Reject inputs that occur in more than one of the splits that a source sets."""
    shared = np.flatnonzero(split != split[group]).tolist()
    errors.add_many(
        "input in two splits",
        len(shared),
        (
            f"{examples.place(i)} ({SPLITS[split[i]]}) and {examples.place(group[i])} ({SPLITS[split[group[i]]]})"
            for i in shared
        ),
    )
    errors.refuse()


def _tensors(
    examples: Examples, split: NDArray[np.int64]
) -> tuple[dict[str, NDArray[Any]], dict[str, tuple[int, ...]]]:
    tensors: dict[str, NDArray[Any]] = {}
    counts: dict[str, tuple[int, ...]] = {}
    for place, name in enumerate(SPLITS):
        rows = split == place
        y = None if examples.y is None else examples.y[rows]
        tensors |= shard_tensors(name, examples.chosen(rows), y)
        counts[name] = (0,) * examples.spec.classes
        if y is not None and examples.spec.classes:
            counts[name] = tuple(np.bincount(y, minlength=examples.spec.classes).tolist())
    return tensors, counts
