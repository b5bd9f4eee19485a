"""Manifest of a federated data set: everything about it except the data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedloom.core import digests
from fedloom.core.words import parsed_json
from fedloom.data.folders import naming_owner
from fedloom.data.input_spec import (
    ChannelAxis,
    DescribesInputs,
    InputSpec,
    Kind,
    Normalization,
    RawInputs,
    inputs_fault,
    joined_normalization,
    named_arrays,
    specs_of,
    without_defaults,
)
from fedloom.data.reserve import Reserved
from fedloom.data.targets import Targets
from fedloom.errors import DataError, as_storage_error
from fedloom.storage.folder import read_file
from fedloom.tasks.names import TaskName

if TYPE_CHECKING:
    from torch import Tensor

MeasuredOn: TypeAlias = Literal["seen", "pool"]
"""Training examples that normalization is measured on.

``seen``: all but those of unseen clients; ``pool``: all, as in publications that use the figures of a whole data set.
"""

CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Pattern of client ids. An id names a file, so it must not be able to name one in another folder."""

VERSION = 3
FIX = "create it again: fedloom partition EXPERIMENT"
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class ClientEntry:
    """Manifest entry of one client.

    Attributes
    ----------
    id
        Stable id; also the name of its shard.
    seen
        True if the client takes part in training.
    train, validation, test
        Number of examples in each split.
    class_counts
        For each split, examples of each class ``[C]``; all zero where the split has no labels.
    sha256
        SHA-256 of the shard file, hex.
    owner
        Name of its natural owner in the source; None where examples were drawn without regard to owners.
    """

    id: str
    seen: bool
    train: int
    validation: int
    test: int
    class_counts: Mapping[str, tuple[int, ...]]
    sha256: str
    owner: str | None = None

    def size(self, split: str) -> int:
        """Return the number of examples in a split, given by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[split]


@dataclass(frozen=True)
class Manifest:
    """Federated data set without its data: each client's examples by split and class, and how the partition was made.

    Attributes
    ----------
    version
        Version of this format.
    dataset, classes, class_names, input_shape, kind
        The source: its name, C, class names, shape of one input, and kind of input. C is 0 if the targets are not
        classes, or there are none.
    scheme, seed, held_out_fraction, validation_fraction
        Settings that the partition was made with.
    normalization
        Applied to every input.
    source_sha256
        SHA-256 of each official file, hex, by name.
    clients
        Entries in order.
    reserved
        Examples or owners reserved for new clients; None, and omitted from the JSON, if there are none.
    shift_groups
        Group of each client where labels are permuted or images rotated (``scheme.shift``); None, and omitted from the
        JSON, if the data are unchanged.
    measured_on
        Examples that normalization was measured on; omitted from the JSON if ``seen``.
    channel_axis, high, tokenizer
        As in :class:`~fedloom.data.input_spec.InputSpec`, of a single input; omitted from the JSON if ``first``, None.
    inputs
        Named inputs, sorted by name; None, and omitted from the JSON, for a single input.
    targets
        Targets that are not classes; None, and omitted from the JSON, for classes.
    """

    version: int
    dataset: str
    classes: int
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    kind: Kind
    scheme: Mapping[str, Any]
    seed: int
    held_out_fraction: float
    validation_fraction: float
    normalization: Normalization
    source_sha256: Mapping[str, str]
    clients: tuple[ClientEntry, ...]
    reserved: Reserved | None = None
    shift_groups: tuple[int, ...] | None = None
    measured_on: MeasuredOn = "seen"
    channel_axis: ChannelAxis = "first"
    high: int | None = None
    tokenizer: str | None = None
    inputs: Mapping[str, InputSpec] | None = None
    targets: Targets | None = None

    @property
    def specs(self) -> Mapping[str, InputSpec]:
        """Input tensors by name; the name of a single one is empty."""
        return specs_of(self)

    @property
    def task(self) -> TaskName:
        """Name of the task that the targets are for."""
        return "classification" if self.targets is None else self.targets.task

    @property
    def outputs(self) -> int:
        """Number of outputs K of a model: classes, labels, numbers, classes of a pixel, or tokens."""
        return self.classes if self.targets is None else self.targets.outputs

    @property
    def figures(self) -> Normalization:
        """Normalizations of all inputs and then of the targets, concatenated; empty if they are not known."""
        targets = () if self.targets is None else (self.targets.normalization,)
        return joined_normalization([*(spec.normalization for spec in self.specs.values()), *targets])

    @property
    def numbers(self) -> int:
        """Length of the normalization of all inputs and targets."""
        targets = 0 if self.targets is None else self.targets.numbers
        return sum(spec.numbers for spec in self.specs.values()) + targets

    @cached_property
    def roster(self) -> tuple[str, ...]:
        """Ids of the seen clients, in order."""
        return tuple(client.id for client in self.clients if client.seen)

    @cached_property
    def unseen(self) -> tuple[str, ...]:
        """Ids of the unseen clients, in order."""
        return tuple(client.id for client in self.clients if not client.seen)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, hex; identifies this partition."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def _entries(self) -> dict[str, ClientEntry]:
        return {client.id: client for client in self.clients}

    @cached_property
    def _owned(self) -> dict[str, ClientEntry]:
        return {client.owner: client for client in self.clients if client.owner is not None}

    def entry(self, client: str) -> ClientEntry:
        """Return the entry of a client; raise DataError if there is no such client."""
        if client not in self._entries and not self.clients:
            raise DataError(f"client {client!r} is not in the roster, which is empty")
        if client not in self._entries:
            first, last = self.clients[0].id, self.clients[-1].id
            allowed = first if first == last else f"one of its {len(self.clients)} clients, {first} to {last}"
            raise DataError(f"client {client!r} is not in the partition of {self.dataset}; choose {allowed}")
        return self._entries[client]

    def named(self, client: str) -> ClientEntry:
        """Return the entry of a client, given its id or its owner's name; raise DataError if there is none."""
        if client in self._owned:
            return self._owned[client]
        try:
            return self.entry(client)
        except DataError as error:
            owners = sorted(self._owned)
            also = f", or an owner's name, {owners[0]} to {owners[-1]}" if owners else ""
            raise DataError(f"{error}{also}") from None

    def class_proportions(self, clients: Sequence[str] | None = None) -> Tensor:
        """Return the class mixes π of train splits, ``[n, C]`` float64, default all clients; zeros if unlabelled."""
        import torch  # here, so that reading a manifest does not import torch

        entries = self.clients if clients is None else [self.entry(client) for client in clients]
        counts = torch.tensor([entry.class_counts["train"] for entry in entries], dtype=torch.float64)
        return counts / counts.sum(1, keepdim=True).clamp(min=1)

    def to_json(self) -> str:
        """Return the canonical JSON: sorted keys, no spaces, and a digest of the rest at its end."""
        # Not dataclasses.asdict, which copies every count and takes seconds for a thousand clients.
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        known = without_defaults(known) | {"clients": [vars(client) for client in self.clients]}
        if self.reserved is None:
            del known["reserved"]  # omitted, as before the key existed: the text identifies the partition
        else:
            known["reserved"] = vars(self.reserved)
        if self.shift_groups is None:
            del known["shift_groups"]
        if self.measured_on == "seen":
            del known["measured_on"]
        return digests.with_compact_digest(json.dumps(known, sort_keys=True, separators=(",", ":"), allow_nan=False))

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "the manifest") -> Manifest:
        """Return the manifest in a JSON text.

        Raise DataError, which calls the text ``where``, if it is not a manifest of this version or contradicts itself.
        """
        content = text.encode() if isinstance(text, str) else text
        try:
            manifest = _ADAPTER.validate_json(digests.without_compact_digest(content))
        except (digests.Damaged, ValidationError) as error:
            version = _version(content)
            if version is not None and version != VERSION:
                raise DataError(
                    f"{where} has version {version}; this FedLoom reads version {VERSION}", hint=FIX
                ) from error
            raise DataError(f"{where} is damaged: {text_fault(error)}", hint=FIX) from error
        fault = _contradiction(manifest)
        try:
            manifest.fingerprint  # noqa: B018 - computed now, so that it fails here
        except ValueError as error:
            fault = fault or f"scheme: {error}"
        if fault is not None:
            raise DataError(f"{where} is damaged: {fault}", hint=FIX)
        return manifest


_ADAPTER = TypeAdapter(Manifest)


class DescribesExamples(DescribesInputs, Protocol):
    """Anything that describes inputs and targets: a manifest, a source."""

    @property
    def classes(self) -> int:
        """Number of classes; 0 if there are none."""

    @property
    def targets(self) -> Targets | None:
        """Targets that are not classes."""


def _version(text: str | bytes) -> int | None:
    """Return the version of a text that may be a manifest of another format; None if it has none."""
    try:
        found = parsed_json(text)
    except ValueError:
        return None
    version = found.get("version") if isinstance(found, dict) else None
    return version if isinstance(version, int) else None


def text_fault(error: digests.Damaged | ValidationError) -> str:
    """Return the key and the error of an invalid JSON text."""
    if isinstance(error, digests.Damaged):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole text'}: {first['msg']:.200}"


def read_stored(path: Path, missing: str, hint: str, *, shared: bool = True) -> bytes:
    """Return the content of a file of a data set, which is ``shared`` if it is in the data root.

    Raise DataError with the message ``missing`` if it does not exist; DataError or StorageError if it cannot be read.
    """
    try:
        with naming_owner(path) if shared else nullcontext():
            return read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{missing}: {path} does not exist", hint=hint) from None
    except OSError as error:
        if shared:
            raise as_storage_error(error) from error
        raise DataError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a partition on disk; raise DataError if it is missing or damaged."""
    path = folder / "partition.json"
    return Manifest.from_json(read_stored(path, "the manifest of a partition is missing", FIX), where=str(path))


def shard_path(folder: Path, client: str) -> Path:
    """Return the path of a client's shard in a partition."""
    return folder / "shards" / f"{client}.safetensors"


def read_shard(folder: Path, entry: ClientEntry) -> bytes:
    """Return the bytes of a client's shard; raise DataError if it is missing, or does not match its hash."""
    path = shard_path(folder, entry.id)
    content = read_stored(path, f"the shard of client {entry.id} is missing", FIX)
    check_shard(content, entry.sha256, str(path), FIX)
    return content


def check_shard(content: bytes, sha256: str, where: str, hint: str) -> None:
    """Check the bytes of a client's shard against their hash; raise DataError with the hint if they differ."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DataError(f"the shard {where} is damaged: its sha256 is {found}; it must be {sha256}", hint=hint)


def _contradiction(manifest: Manifest) -> str | None:
    if manifest.version != VERSION:
        return f"version is {manifest.version}; it must be {VERSION}"
    if len(manifest.class_names) != manifest.classes:
        return f"class_names has {len(manifest.class_names)} names; it must have {manifest.classes} (classes)"
    fault = inputs_fault(manifest) or targets_fault(manifest.targets, manifest.classes, manifest.class_names)
    if fault is not None:
        return fault
    if not manifest.clients and manifest.dataset != "own":  # clients may join later
        return "it has no clients"
    if len({client.id for client in manifest.clients}) != len(manifest.clients):
        return "a client id occurs twice"
    if manifest.shift_groups is not None and len(manifest.shift_groups) != len(manifest.clients):
        return (
            f"shift_groups has {len(manifest.shift_groups)} numbers; it must have one for each of "
            f"{len(manifest.clients)} clients"
        )
    return next((fault for each in manifest.clients if (fault := entry_contradiction(each, manifest.classes))), None)


def examples_fault(x: RawInputs, y: NDArray[Any] | None, about: DescribesExamples) -> str | None:
    """Return why a shard's examples do not fit a description of inputs and targets, or None."""
    specs, arrays = specs_of(about), named_arrays(x)
    if set(arrays) != set(specs):
        return f"the inputs are {', '.join(arrays) or '(none)'}; they must be {', '.join(specs)}"
    for name, spec in specs.items():
        what = f"the inputs {name} are" if name else "the inputs are"
        if (fault := spec.values_fault(arrays[name], about.classes, what)) is not None:
            return fault
    counts = {len(each) for each in arrays.values()}
    if len(counts) > 1:
        return f"the inputs have {' and '.join(map(str, sorted(counts)))} examples; their numbers must be equal"
    count = counts.pop()
    if y is None:
        return None
    if about.targets is not None:
        return about.targets.values_fault(y, count)
    if y.dtype != np.int64 or y.shape != (count,):
        return f"the labels are {y.dtype} of shape {list(y.shape)}; they must be int64, [{count}]"
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < about.classes:
        return f"the labels are {int(y.min())} to {int(y.max())}; they must be 0 to {about.classes - 1}"
    return None


def targets_fault(targets: Targets | None, classes: int, class_names: Sequence[str]) -> str | None:
    """Return a contradiction between a description of targets and the classes, or None."""
    if targets is None:
        return None
    if classes or class_names:
        return f"targets is {targets.task}, so classes must be 0 and have no names (got {classes})"
    return targets.fault()


def entry_contradiction(client: ClientEntry, classes: int) -> str | None:
    """Return a contradiction within a client's entry, or None."""
    if not CLIENT_ID.fullmatch(client.id):
        return f"client id is {client.id!r}; it must have only letters, digits, '.', '_' and '-'"
    if not re.fullmatch(r"[0-9a-f]{64}", client.sha256):
        return f"sha256 of {client.id} is {client.sha256!r}; it must be 64 hex digits"
    if set(client.class_counts) != set(SPLITS):
        return f"class_counts of {client.id} has {sorted(client.class_counts)}; it must have {sorted(SPLITS)}"
    for split in SPLITS:
        size, counts = client.size(split), client.class_counts[split]
        if size < 0 or min(counts, default=0) < 0 or len(counts) != classes:
            return f"{split} of {client.id} must have {classes} class counts, none negative"
        if sum(counts) not in (0, size):
            return f"{split} of {client.id} has {size} examples and class counts that sum to {sum(counts)}"
    return None
