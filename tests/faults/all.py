"""All faults, in the order of the table, and the process that tries them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from s3_support import S3Server

from faults import attacks, cuts, disks, endurance, fuzz, kills, machine, proxied
from faults.place import Place
from faults.table import Fault, Tried, try_once

FAULTS: tuple[Fault, ...] = (
    *kills.FAULTS,
    *cuts.FAULTS,
    *proxied.FAULTS,
    *attacks.FAULTS,
    *fuzz.FAULTS,
    *machine.FAULTS,
    *disks.FAULTS,
    *endurance.FAULTS,
)

_place: Place


def prepare(folder: Path, root: Path, s3: S3Server | None, rounds: int) -> None:
    """Make this process ready for trials."""
    global _place
    logging.getLogger("fedloom").addHandler(logging.NullHandler())  # peers are rejected here all the time
    own = folder / f"place-{os.getpid()}"
    own.mkdir()
    _place = Place(own, root, s3, rounds)


def try_named(name: str, seed: int) -> tuple[Tried | str, float]:
    """Run one trial; return its result or the reason of its failure, and the seconds it took."""
    outcome, seconds = try_once(next(fault for fault in FAULTS if fault.name == name), _place, seed)
    return (outcome if isinstance(outcome, Tried) else f"{type(outcome).__name__}: {outcome}"), seconds
