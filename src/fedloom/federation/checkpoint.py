"""Checkpoints: the server's state and nothing else, so that the same state is the same bytes.

A file ``round-<t>.safetensors`` holds the state's tensors, and under the one metadata key ``fedloom`` (safetensors
does not keep the order of several) a JSON object: format version, algorithm and its version, round, and the best
round so far. No times, hosts or paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedloom.errors import DataError
from fedloom.storage.folder import write_atomically

VERSION = 1
KEPT = 2
_NAME = re.compile(r"round-(\d{6,})\.safetensors")


@dataclass(frozen=True)
class Best:
    """The round of highest validation score of seen clients (pooled accuracy, or minus the loss of data without
    classes), the earliest on ties."""

    round: int
    score: float


@dataclass(frozen=True)
class Checkpoint:
    """A durable round."""

    algorithm: str
    algorithm_version: int
    round: int
    best: Best | None
    state: dict[str, Tensor]

    def encode(self) -> bytes:
        """The file's bytes."""
        about = {
            "version": VERSION,
            "algorithm": self.algorithm,
            "algorithm_version": self.algorithm_version,
            "round": self.round,
            "best": None if self.best is None else [self.best.round, self.best.score],
        }
        return safetensors.torch.save(self.state, metadata={"fedloom": json.dumps(about, sort_keys=True)})


class Checkpoints:
    """The checkpoints of a run: the last two and the best are kept, and writing overlaps with training.

    Parameters
    ----------
    before
        Called in the background before each checkpoint is written, which it has to wait for.
    after
        Called in the background with each round that has become durable; the next checkpoint waits for it, and raises
        what it raised.
    """

    def __init__(
        self,
        folder: Path,
        before: Callable[[], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> None:
        self._folder = folder
        self._before = before
        self._after = after
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint in the background. The state is copied before this returns.

        Raises
        ------
        StorageError
            If the one before could not be written.
        """
        self.wait()
        copied = {name: tensor.detach().clone() for name, tensor in checkpoint.state.items()}
        copy = Checkpoint(checkpoint.algorithm, checkpoint.algorithm_version, checkpoint.round, checkpoint.best, copied)
        self._writing = self._writer.submit(self._write, copy)

    def wait(self) -> None:
        """Wait until everything saved is durable, and what comes after that is done.

        Raises
        ------
        StorageError
            If it could not be written.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait, and end the writer."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, ascending."""
        if not self._folder.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def load(self, which: str | int = "last") -> Checkpoint:
        """Read a checkpoint.

        Parameters
        ----------
        which
            ``last``, ``best`` or a round.

        Raises
        ------
        DataError
            If there is no such checkpoint, or it is damaged.
        """
        rounds = self.rounds()
        if not rounds:
            raise DataError(f"{self._folder}: no checkpoint", hint="restore them, or run anew, elsewhere with --out")
        if which == "last":
            return self._read(rounds[-1])
        if which == "best":
            best = self._read(rounds[-1]).best
            if best is None:
                raise DataError(f"{self._folder}: no round was validated, so none is the best", hint="use last")
            which = best.round
        if which not in rounds:
            kept = ", ".join(str(round) for round in rounds)
            raise DataError(f"{self._folder}: no checkpoint of round {which}; there are those of rounds {kept}")
        return self._read(int(which))

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:06d}.safetensors"

    def _write(self, checkpoint: Checkpoint) -> None:
        if self._before is not None:
            self._before()
        write_atomically(self._path(checkpoint.round), checkpoint.encode())
        rounds = self.rounds()
        keep = {*rounds[-KEPT:], *([checkpoint.best.round] if checkpoint.best else [])}
        for round in rounds:
            if round not in keep:
                self._path(round).unlink(missing_ok=True)
        if self._after is not None:
            self._after(checkpoint.round)

    def _read(self, round: int) -> Checkpoint:
        path = self._path(round)
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["fedloom"])
                if about["version"] != VERSION:
                    raise DataError(f"{path}: checkpoint format {about['version']}, this FedLoom reads {VERSION}")
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                best = None if about["best"] is None else Best(*about["best"])
                return Checkpoint(about["algorithm"], about["algorithm_version"], about["round"], best, state)
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise DataError(
                f"{path}: not a checkpoint ({error})", hint="remove the file to go on from the one before"
            ) from error


def check_fits(checkpoint: Checkpoint, state: Mapping[str, Tensor], algorithm: str, version: int) -> None:
    """Check that a checkpoint is of this algorithm and these shapes.

    Raises
    ------
    DataError
        If it is not.
    """
    if (checkpoint.algorithm, checkpoint.algorithm_version) != (algorithm, version):
        raise DataError(
            f"checkpoint of {checkpoint.algorithm} version {checkpoint.algorithm_version}, "
            f"needed: {algorithm} version {version}"
        )

    def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    found, needed = described(checkpoint.state), described(state)
    if found != needed:
        name = next(iter(sorted(set(found.items()) ^ set(needed.items()), key=str)))[0]
        raise DataError(f"checkpoint does not fit: {name} is {found.get(name)}, needed {needed.get(name)}")
