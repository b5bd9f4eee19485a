"""Checkpoints: only the server's state, so that equal states give equal bytes.

A file ``round-<t>.safetensors`` holds the state's tensors, the format version, the algorithm and its version, the
round, and the best round so far. It holds no times, hosts or paths.

Tensor files of checkpoints and of clients' states detect damage: safetensors with one metadata key, ``fedloom``
(safetensors does not preserve the order of several): a JSON object whose first key, ``sha256``, is the digest of the
whole file with 64 zeros in the digest's place. So it covers names, shapes and metadata as well as values, and equal
content gives equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedloom.core.files import read_file, write_atomically
from fedloom.core.memory import spooled
from fedloom.core.words import parsed_json
from fedloom.errors import NEW_RUN, DataError, argument, as_storage_error
from fedloom.runs.files import checkpoint_files

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_BEFORE = b'{"__metadata__":{"fedloom":"{\\"sha256\\": \\"'
_AT = slice(8 + len(_BEFORE), 8 + len(_BEFORE) + 64)
_ZEROS = b"0" * 64


_DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Types in the order of safetensors."""


def tensor_parts(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> list[Buffer]:
    """Return the parts of a file of safetensors, to the byte, without copying dense tensors on the CPU."""
    kinds = list(_DTYPES)
    ordered = sorted(tensors.items(), key=lambda item: (kinds.index(item[1].dtype), item[0]))
    text = json.dumps({"sha256": _ZEROS.decode(), **dict(sorted(about.items()))})
    header: dict[str, object] = {"__metadata__": {"fedloom": text}}
    data: list[Buffer] = []
    start = 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        place = [start, start := start + size]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data.append(cast("Buffer", tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    fields = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head = (len(fields) + -len(fields) % 8).to_bytes(8, "little") + fields + b" " * (-len(fields) % 8)
    digest = hashlib.sha256(head)
    for part in data:
        digest.update(part)
    return [head[: _AT.start], digest.hexdigest().encode(), head[_AT.stop :], *data]


def decode_tensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the metadata of a file.

    Raise ValueError if its digest is missing or wrong, or the file is not valid.
    """
    if content[8 : _AT.start] != _BEFORE:
        raise ValueError("it has no digest; another version of FedLoom may have written it")
    stored_digest, actual_digest = content[_AT].decode("ascii", errors="replace"), _digest(content)
    if stored_digest != actual_digest:
        raise ValueError(f"damaged: its sha256 is {actual_digest[:12]}, and must be {stored_digest[:12]}")
    try:
        header = parsed_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata: dict[str, Any] = parsed_json(header["__metadata__"]["fedloom"])
        del metadata["sha256"]
        return safetensors.torch.load(content), metadata
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"damaged: {error}") from error


def stored_digest(content: bytes) -> str:
    """Return the digest stored in a file that :func:`decode_tensors` has checked."""
    return content[_AT].decode("ascii")


def _digest(content: bytes) -> str:
    """Return the digest of a file, ignoring the stored one."""
    parts = memoryview(content)
    digest = hashlib.sha256(parts[: _AT.start])
    digest.update(_ZEROS)
    digest.update(parts[_AT.stop :])
    return digest.hexdigest()


VERSION = 2
KEPT = 2

FEDERATION = "federation/"
"""Beginning of the names of tensors that are not the method's."""


@dataclass(frozen=True)
class Best:
    """Round with the highest validation score of seen clients, the earliest on ties.

    The score is the pooled headline metric of the task, or minus that metric if lower is better.
    """

    round: int
    score: float


@dataclass(frozen=True)
class Checkpoint:
    """A durable round, with the ``state`` of the server algorithm.

    ``digest`` is the SHA-256 (hex) of the file that it was read from, empty if from none; ``federation`` state other
    than the method's: with adaptive clipping, the clipping norm.
    """

    algorithm: str
    algorithm_version: int
    round: int
    best: Best | None
    state: dict[str, Tensor]
    digest: str = ""
    federation: Mapping[str, Tensor] = field(default_factory=dict)

    def encode(self) -> list[Buffer]:
        """Return the parts of the file."""
        metadata = {
            "version": VERSION,
            "algorithm": self.algorithm,
            "algorithm_version": self.algorithm_version,
            "round": self.round,
            "best": None if self.best is None else [self.best.round, self.best.score],
        }
        beside = {FEDERATION + name: tensor for name, tensor in self.federation.items()}
        return tensor_parts({**self.state, **beside}, metadata)


class Checkpoints:
    """Checkpoints of a run: the last two and the best are kept, and writing overlaps with training.

    In the background, ``before`` is called before each checkpoint is written, ``done`` with each round that has become
    durable, and then ``after`` with the round; the next checkpoint waits for that, and raises its error.
    """

    def __init__(
        self,
        folder: Path,
        on_start: Callable[[], None] | None = None,
        on_write: Callable[[int], None] | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        self._folder = folder
        self._before = on_start
        self._done = on_write
        self._after = on_end
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Copy the state, and write a checkpoint in the background; raise StorageError if the previous write failed."""
        self.wait()
        copied = {name: _copied(tensor.detach()) for name, tensor in checkpoint.state.items()}
        self._writing = self._writer.submit(self._write, replace(checkpoint, state=copied))

    def again(self, round: int) -> None:
        """Call ``after`` again with a durable round, in the background, once all saved rounds are durable."""
        self.wait()
        if self._after is not None:
            self._writing = self._writer.submit(self._after, round)

    def wait(self) -> None:
        """Wait until everything saved is durable and ``after`` has returned; raise StorageError if it cannot be."""
        if self._writing is not None:
            task, self._writing = self._writing, None
            task.result()

    def close(self) -> None:
        """Wait until everything is written, and stop the writer."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, ascending."""
        return list(checkpoint_files(self._folder))

    def written_at(self, round: int) -> float:
        """Return when the checkpoint of a round was written, in seconds since 1970."""
        return self._path(round).stat().st_mtime

    def load(self, which: str | int = "last") -> Checkpoint:
        """Read a checkpoint: ``last``, ``best`` or that of a round.

        Raise DataError if there is no such checkpoint, or it is damaged (the hint names the others); StorageError if it
        cannot be read.
        """
        rounds = self.rounds()
        if not rounds:
            raise DataError(f"{self._folder} has no checkpoint", hint=f"restore the checkpoints, or {NEW_RUN}")
        if which == "last":
            return self._read(rounds[-1])
        if which == "best":
            best = self._read(rounds[-1]).best
            if best is None:
                message = f"{self._folder} has no best checkpoint, because no round was validated"
                raise DataError(message, hint="use last")
            which = best.round
        if which not in rounds:
            listing = ", ".join(map(str, rounds))
            raise DataError(f"{self._folder} has no checkpoint of round {which}; it has those of rounds {listing}")
        return self._read(int(which))

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:06d}.safetensors"

    def _write(self, checkpoint: Checkpoint) -> None:
        if self._before is not None:
            self._before()
        write_atomically(self._path(checkpoint.round), *checkpoint.encode())
        rounds = self.rounds()
        keep = {*rounds[-KEPT:], *([checkpoint.best.round] if checkpoint.best else [])}
        for round in rounds:
            if round not in keep:
                self._path(round).unlink(missing_ok=True)
        if self._done is not None:
            self._done(checkpoint.round)
        if self._after is not None:
            self._after(checkpoint.round)

    def _read(self, round: int) -> Checkpoint:
        path = self._path(round)
        try:
            content = read_file(path)
            state, metadata = decode_tensors(content)
            if (version := metadata["version"]) != VERSION:
                raise DataError(
                    f"{path} has format {version}, and this FedLoom reads format {VERSION}.",
                    hint="use the version of FedLoom that wrote it; nothing has been changed",
                )
            if metadata["round"] != round:
                raise ValueError(f"it holds the checkpoint of round {metadata['round']}")
            names = [name for name in state if name.startswith(FEDERATION)]
            return Checkpoint(
                metadata["algorithm"],
                metadata["algorithm_version"],
                round,
                None if metadata["best"] is None else Best(*metadata["best"]),
                federation={name.removeprefix(FEDERATION): state.pop(name) for name in names},
                state=state,
                digest=stored_digest(content),
            )
        except OSError as error:
            raise as_storage_error(error) from error
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is not a checkpoint: {error}", hint=self._instead(round)) from error

    def _instead(self, round: int) -> str:
        """Return a hint on how to replace the checkpoint of a round; no other is used automatically."""
        others = [other for other in self.rounds() if other != round]
        if not others:
            return f"it is the only one: restore it from a copy, or {NEW_RUN}"
        hint = f"restore it from a copy, or use another with {argument('checkpoint')}: {', '.join(map(str, others))}"
        if older := [other for other in others if other < round]:
            hint += f"; remove the file to continue from round {older[-1]} with {argument('resume')}"
        return hint


def _copied(tensor: Tensor) -> Tensor:
    file = spooled(tensor.nbytes)
    if file is None:
        return tensor.clone()
    return torch.frombuffer(file, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def check_fits(checkpoint: Checkpoint, state: Mapping[str, Tensor], algorithm: str, version: int) -> None:
    """Raise DataError unless a checkpoint has this algorithm and tensors of these shapes and types."""
    if (checkpoint.algorithm, checkpoint.algorithm_version) != (algorithm, version):
        raise DataError(
            f"the checkpoint is of {checkpoint.algorithm} version {checkpoint.algorithm_version}, and the run needs "
            f"{algorithm} version {version}"
        )

    def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    stored_shapes, expected_shapes = described(checkpoint.state), described(state)
    if stored_shapes != expected_shapes:
        name = next(iter(sorted(set(stored_shapes.items()) ^ set(expected_shapes.items()), key=str)))[0]
        raise DataError(
            f"the checkpoint does not fit: {name} is {stored_shapes.get(name)}, and must be {expected_shapes.get(name)}"
        )
