"""Generated folders like those that LEAF's scripts write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Users = Mapping[str, tuple[list[Any], list[Any]]]
"""x and y of each user."""


def document(users: Users) -> dict[str, Any]:
    """Return the content of one of LEAF's files."""
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }


def files(**parts: list[Users]) -> dict[str, bytes]:
    """Return the files of each part, by name."""
    return {
        f"{part}/all_data_{i}_niid_0_keep_0_{part}_9.json": json.dumps(document(users)).encode()
        for part, documents in parts.items()
        for i, users in enumerate(documents)
    }


def write(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Write files into a folder, and return it."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def images(count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Return x and y of a FEMNIST user: ``count`` images of k/255 as in LEAF's files, classes counted from ``seed``."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 784))
    return (pixels / 255).tolist(), [(seed + i) % 62 for i in range(count)]


def femnist(users: int = 4) -> dict[str, bytes]:
    """Return a small FEMNIST: two files of train and of test, each with half of the users."""
    half = users // 2
    parts = {
        part: [{f"f{i:04d}_{i:02d}": images(count, i) for i in some} for some in (range(half), range(half, users))]
        for part, count in (("train", 9), ("test", 1))
    }
    return files(**parts)
