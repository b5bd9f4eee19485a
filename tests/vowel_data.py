"""The vowel fixture: a data root with it, its examples, and a small experiment on its 15 speakers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.datasets.binary import read_vowel

FILE = Path(__file__).parent / "fixtures" / "Vowel.rda"
SPEAKERS = {"dataset": "vowel", "partition": {"scheme": "natural"}, "held_out_fraction": 0.2}


def vowel_root(folder: Path) -> Path:
    """Put the fixture into a data root, and return the root."""
    data = folder / "datasets" / "vowel"
    data.mkdir(parents=True, exist_ok=True)
    shutil.copy(FILE, data)
    return folder


def vowel_experiment(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return an experiment in one process on a data root below the folder: 12 speakers train, 3 are new."""
    return {
        "name": "vowels",
        "data": {**SPEAKERS, "root": str(vowel_root(folder / "data"))},
        "model": {"name": "mlp", "hidden": [4]},
        "runtime": {"workers": 0},
        **sections,
    }


def vowel_examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, labels and speakers of all examples."""
    official = read_vowel({"Vowel.rda": FILE.read_bytes()})
    pools = (official.train, official.test)
    x, y, owners = (np.concatenate([getattr(pool, name) for pool in pools]) for name in ("inputs", "labels", "owners"))
    return x, y, owners
