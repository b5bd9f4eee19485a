"""JSON files of LEAF (Caldas et al. 2018), which users create with LEAF's own scripts.

A file holds several users: ``{"users": [name], "num_samples": [n], "user_data": {name: {"x": [...], "y": [...]}}}``.
LEAF writes all users to ``all_data/``, in several files; its ``-s niid -t sample`` splits each user's examples between
``train/`` and ``test/``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.data.datasets.base import Owners, OwnFiles, Pool, RawDataset
from fedloom.errors import DataError

Encode: TypeAlias = Callable[[list[Any], list[Any], str], tuple[NDArray[np.uint8], NDArray[np.int64]]]
"""Maps one user's x, y, and name in errors to inputs ``[n, *input_shape]`` and labels ``[n]``."""

DIVIDED = ("train", "test")
WHOLE = ("all_data",)


def leaf_files(folder: Path) -> tuple[str, ...]:
    """Return LEAF's files in a folder: those of ``train/`` and ``test/``, else those of ``all_data/``, if any.

    Raise DataError if only one of ``train/`` and ``test/`` has files.
    """
    for parts in (DIVIDED, WHOLE):
        found = {part: sorted(path.name for path in (folder / part).glob("[!.]*.json")) for part in parts}
        empty = [part for part in parts if not found[part]]
        if not empty:
            return tuple(f"{part}/{name}" for part in parts for name in found[part])
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
    seen: dict[str, str] = {}
    for name in sorted(name for name in contents if name.startswith(f"{part}/")):
        for user, x, y in _users(contents[name], name):
            where = f"{name}, user {user!r}"
            if user in seen:
                raise DataError(f"{where}: this user is also in {seen[user]}; every user must be in one file")
            if part == "test" and user not in index:
                raise DataError(
                    f"{where}: this user is in test, but not in train; divide the examples of every user (LEAF's -t "
                    "sample)"
                )
            seen[user] = name
            user_inputs, user_labels = encode(x, y, where)
            inputs.append(user_inputs)
            labels.append(user_labels)
            owners.append(np.full(len(y), index.setdefault(user, len(index)), dtype=np.int64))
    if not inputs:
        raise DataError(f"the files of {part}/ hold no users")
    return Pool(np.concatenate(inputs), np.concatenate(labels), np.concatenate(owners))


def _users(content: bytes, name: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield name, x and y of each user in a file; x and y have the stated length, at least one."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not JSON, or is truncated: {error}") from error
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        if not isinstance(document, dict) or not isinstance(document.get(key), kind):
            raise DataError(f"{name} is not in LEAF's format: it must be an object with {key!r}, a {kind.__name__}")
    users, counts, data = document["users"], document["num_samples"], document["user_data"]
    if len(users) != len(counts) or sorted(map(str, users)) != sorted(data):
        raise DataError(
            f"{name} contradicts itself: {len(users)} users, {len(counts)} num_samples and user_data of {len(data)}; "
            "all three must list the same users, each once"
        )
    for user, count in zip(users, counts, strict=True):
        examples = data.pop(user, None) if isinstance(user, str) else None
        yield user, *_lists(examples, count, f"{name}, user {user!r}")


def _lists(examples: Any, count: Any, where: str) -> tuple[list[Any], list[Any]]:
    if not isinstance(examples, dict) or not all(isinstance(examples.get(key), list) for key in "xy"):
        raise DataError(f"{where}: the user must have a name, and an object with the lists 'x' and 'y'")
    x, y = examples["x"], examples["y"]
    if not len(x) == len(y) == count:
        raise DataError(f"{where}: it has {len(x)} x and {len(y)} y, but num_samples is {count}")
    if not y:
        raise DataError(f"{where}: it has no examples; remove such users (LEAF's -k)")
    return x, y
