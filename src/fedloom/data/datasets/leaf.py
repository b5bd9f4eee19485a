"""JSON files of LEAF (Caldas et al. 2018), which users create with LEAF's own scripts, and FEMNIST in them.

A file holds several users: ``{"users": [name], "num_samples": [n], "user_data": {name: {"x": [...], "y": [...]}}}``.
LEAF writes all users to ``all_data/``, in several files; its ``-s niid -t sample`` splits each user's examples between
``train/`` and ``test/``.

FEMNIST is handwritten digits and letters by writer, from NIST's Special Database 19. LEAF's script downloads and
converts the data; there are no official files. Pixels are as in LEAF: dark on white (1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedloom.data.datasets.base import Owners, OwnFiles, Pool, RawDataset
from fedloom.data.spec import text_fault
from fedloom.errors import DataError

Encode: TypeAlias = Callable[[list[Any], list[Any], str], tuple[NDArray[np.uint8], NDArray[np.int64]]]
"""Maps one user's x, y, and name in errors to inputs ``[n, *input_shape]`` and labels ``[n]``."""

DIVIDED = ("train", "test")
WHOLE = ("all_data",)

SIDE, CLASSES = 28, 62
"""Sides of FEMNIST's images, and number of its classes."""
TOLERANCE = 1e-4
"""Deviation of a value from k/255 that is taken for rounding."""


@dataclass(frozen=True)
class _Examples:
    """Examples of one user."""

    x: list[Any]
    y: list[Any]


@dataclass(frozen=True)
class _File:
    """Content of a file."""

    users: list[str]
    num_samples: list[int]
    user_data: dict[str, _Examples]


_FILE = TypeAdapter(_File)


def leaf_files(folder: Path) -> tuple[str, ...]:
    """Return LEAF's files in a folder: those of ``train/`` and ``test/``, else those of ``all_data/``, if any.

    Raise DataError if only one of ``train/`` and ``test/`` has files.
    """
    for parts in (DIVIDED, WHOLE):
        names = {part: sorted(path.name for path in (folder / part).glob("[!.]*.json")) for part in parts}
        empty = [part for part in parts if not names[part]]
        if not empty:
            return tuple(f"{part}/{name}" for part in parts for name in names[part])
        if len(empty) < len(parts):
            raise DataError(f"{folder / empty[0]} holds no .json file; train/ and test/ must each have at least one")
    return ()


OWN_FILES = OwnFiles("LEAF's train/*.json and test/*.json, or its all_data/*.json", leaf_files)


def read_leaf(contents: Mapping[str, bytes], encode: Encode, overlap: int = 0) -> RawDataset:
    """Return the content of LEAF's files, with one file in memory at a time; its users are the owners.

    Raise DataError if a file is not LEAF's JSON or is truncated; if a user has no examples, occurs twice or only in
    test; or if examples differ from the stated number or are invalid. Names the file and, where relevant, the user.

    Parameters
    ----------
    contents
        By file name: ``train/...`` and ``test/...``; or ``all_data/...``, which makes the train pool, not split.
    encode
        Checks and converts the examples of one user.
    overlap
        See :class:`~fedloom.data.datasets.base.Owners`.
    """
    divided = any(name.startswith("train/") for name in contents)
    index: dict[str, int] = {}
    pools = [_pool(contents, part, encode, index) for part in (DIVIDED if divided else WHOLE)]
    if not divided:
        train = pools[0]
        pools.append(Pool(np.asarray(train.inputs)[:0], train.labels[:0], np.empty(0, dtype=np.int64)))
    return RawDataset(pools[0], pools[1], Owners(tuple(index), divided, overlap))


def _pool(contents: Mapping[str, bytes], part: str, encode: Encode, index: dict[str, int]) -> Pool:
    """Return the examples of a part; users of train are added to the index, those of test must be in it."""
    inputs, labels, owners = [], [], []
    files: dict[str, str] = {}
    for name in sorted(name for name in contents if name.startswith(f"{part}/")):
        for user, x, y in _users(contents[name], name):
            whose = f"{name}, user {user!r}"
            if user in files:
                raise DataError(f"{whose}: this user is also in {files[user]}; every user must be in one file")
            if part == "test" and user not in index:
                raise DataError(
                    f"{whose}: this user is in test, but not in train; divide the examples of every user (LEAF's -t "
                    "sample)"
                )
            files[user] = name
            user_inputs, user_labels = encode(x, y, whose)
            inputs.append(user_inputs)
            labels.append(user_labels)
            owners.append(np.full(len(y), index.setdefault(user, len(index)), dtype=np.int64))
    if not inputs:
        raise DataError(f"the files of {part}/ hold no users")
    return Pool(np.concatenate(inputs), np.concatenate(labels), np.concatenate(owners))


def _users(content: bytes, name: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield name, x and y of each user in a file; x and y have the stated length, at least one."""
    try:
        file = _FILE.validate_json(content)
    except ValidationError as error:
        raise DataError(f"{name} is not JSON in LEAF's format: {text_fault(error)}") from error
    if len(file.users) != len(file.num_samples) or sorted(file.users) != sorted(file.user_data):
        raise DataError(
            f"{name} contradicts itself: {len(file.users)} users, {len(file.num_samples)} num_samples and user_data of "
            f"{len(file.user_data)}; all three must list the same users, each once"
        )
    for user, count in zip(file.users, file.num_samples, strict=True):
        examples = file.user_data.pop(user)
        if not 0 < len(examples.x) == len(examples.y) == count:
            raise DataError(
                f"{name}, user {user!r}: it has {len(examples.x)} x and {len(examples.y)} y, and num_samples is "
                f"{count}; they must be equal, and at least 1"
            )
        yield user, examples.x, examples.y


def read_femnist(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of FEMNIST's files."""
    return read_leaf(contents, _encoded_images)


def _encoded_images(x: list[Any], y: list[Any], whose: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return a user's images ``[n, 1, 28, 28]`` and classes ``[n]``; a value k/255, to 1e-4, becomes k."""
    for position, image in enumerate(x):
        if not isinstance(image, list) or len(image) != SIDE * SIDE:
            fault = f"has {len(image)} values" if isinstance(image, list) else "is not a list"
            raise DataError(f"{whose}: image {position} {fault}; it must have {SIDE * SIDE}, {SIDE} x {SIDE} pixels")
    try:
        values = np.array(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{whose}: an image has a value that is not a number: {error}") from error
    pixels = np.rint(values * 255)
    right = (np.abs(values - pixels / 255) <= TOLERANCE) & (pixels >= 0) & (pixels <= 255)
    if not right.all():
        image, position = np.argwhere(~right)[0]
        raise DataError(
            f"{whose}: image {image} has the value {values[image, position]} at {position}; it must be k/255, k a "
            "whole number from 0 to 255"
        )
    for position, label in enumerate(y):
        if type(label) is not int or not 0 <= label < CLASSES:
            raise DataError(f"{whose}: label {position} is {label!r}; it must be 0 to {CLASSES - 1}")
    return pixels.astype(np.uint8).reshape(-1, 1, SIDE, SIDE), np.array(y, dtype=np.int64)
