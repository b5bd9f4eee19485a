"""Federated data set: a manifest, and one shard per client that a worker loads separately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedloom.core.home import expanded
from fedloom.core.urls import is_url
from fedloom.data.inputs import Inputs, count, each_named
from fedloom.data.manifest import (
    FIX,
    SPLITS,
    ClientEntry,
    Manifest,
    read_manifest,
    read_shard,
    shard_path,
)
from fedloom.data.own import AGAIN, SHARD, OwnClients, read_own_shard
from fedloom.data.remote import Remote
from fedloom.data.spec import DataSpec, InputSpec, Normalization, Targets, input_key
from fedloom.errors import DataError, argument
from fedloom.storage import open_store

__all__ = ["ClientData", "ClientEntry", "FederatedDataset", "Manifest", "Normalization", "Split"]


@dataclass(frozen=True, eq=False)
class Split:
    """Examples of one client.

    Attributes
    ----------
    x
        ``[n, *input_shape]``: normalized float32 for pixels and features, unchanged uint8 for tokens and int64 for
        integers; or such tensors by name.
    y
        Targets, or None if unlabelled: ``[n]`` int64 classes; ``[n, K]`` float32 0 or 1 for each label; ``[n]`` or
        ``[n, k]`` float32 numbers, standardized; ``[n, height, width]`` int64 masks; ``[n, length]`` int64 tokens.
    """

    x: Inputs
    y: Tensor | None

    def __len__(self) -> int:
        return count(self.x)


@dataclass(frozen=True, eq=False)
class ClientData:
    """Private data of one client, identified by its id in the manifest: disjoint splits with the same class mix.

    ``classes`` is C, the number of classes in the whole data set; 0 if the targets are not classes.
    """

    id: str
    train: Split
    validation: Split
    test: Split
    classes: int

    @property
    def present(self) -> Tensor:
        """Labels that occur in the train split, ``[C]`` bool; DataError if it has none."""
        if self.train.y is None:
            raise DataError(
                f"client {self.id} has no training labels, so its classes are unknown",
                hint="set evaluation.label_mask: false, or give the client labels",
            )
        return torch.bincount(self.train.y, minlength=self.classes) > 0


class FederatedDataset:
    """Partition, read one client at a time.

    Parameters
    ----------
    folder
        Holds ``partition.json`` and ``shards/<client>.safetensors``; with a ``source``, only the shards requested so
        far.
    manifest
        Content of ``partition.json``.
    source
        Published partition to fetch from, if the folder does not hold all of it.
    """

    hint: ClassVar = FIX
    """Advice in errors about damaged files."""

    def __init__(self, folder: Path, manifest: Manifest, source: Remote | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self.source = source
        self._loaded: dict[str, ClientData] = {}

    @classmethod
    def open(cls, where: Path | str, cache: Path | None = None) -> FederatedDataset:
        """Open a partition; read its manifest but no shard.

        Raise DataError if the manifest is missing or damaged; StorageError or RefusedError or ExperimentError if
        ``where`` is a URL and the store fails, the store denies access, or the URL is invalid.

        Parameters
        ----------
        where
            Its folder, or the URL where it is published (:func:`fedloom.data.remote.publish`). Shards of a published
            partition are fetched on first use.
        cache
            Folder for fetched files. Any number of processes may share it, and it outlives them. Default: a temporary
            folder that is removed with the data set.
        """
        if not is_url(where):
            return cls(expanded(where), read_manifest(expanded(where)))
        source = Remote(open_store(where))
        manifest = source.manifest()
        return cls(source.cached(manifest, cache), manifest, source)

    def described_by(self, manifest: Manifest) -> FederatedDataset:
        """Return the same data under another manifest."""
        return FederatedDataset(self.folder, manifest, self.source)

    def verify(self, clients: Iterable[str] | None = None) -> None:
        """Check the shards of these clients (default: all) against their hashes, and keep none in memory.

        Shards of a published partition are fetched.

        Raise DataError if there is no such client, or a shard is missing or damaged.
        """
        entries = self.manifest.clients if clients is None else [self.manifest.entry(client) for client in clients]
        for entry in entries:
            self._shard(entry)

    def _shard(self, entry: ClientEntry) -> bytes:
        return read_shard(self.folder, entry) if self.source is None else self.source.shard(self.folder, entry)

    def client(self, client: str) -> ClientData:
        """Return one client's data, checked against the manifest and normalized; the result is cached.

        Raise DataError if there is no such client, or its shard is missing or does not match the manifest.
        """
        if client not in self._loaded:
            self._loaded[client] = self._load(self.manifest.entry(client))
        return self._loaded[client]

    def standardized(self, client: str) -> ClientData:
        """Return one client's data like :meth:`client`, with integers standardized like features."""
        data = self.client(client)
        specs = {name: spec for name, spec in self.manifest.spec.inputs.items() if spec.kind == "integers"}

        def changed(split: Split) -> Split:
            return Split(
                each_named(split.x, lambda name, x: standardize(x, specs[name]) if name in specs else x), split.y
            )

        return ClientData(client, changed(data.train), changed(data.validation), changed(data.test), data.classes)

    def shard_file(self, client: str) -> Path:
        """Return the path of a client's shard."""
        return shard_path(self.folder, client)

    def tensors(self, client: str) -> dict[str, Tensor]:
        """Return the raw content of a client's shard, given its id or its owner's name; nothing is cached.

        Raise DataError if there is no such client, or its shard is missing or damaged.
        """
        entry = self.manifest.named(client)
        content = self._shard(entry)
        try:
            return safetensors.torch.load(content)
        except SafetensorError as error:
            path = self.shard_file(entry.id)
            raise DataError(f"the shard {path} is not a safetensors file: {error}", hint=self.hint) from error

    def _load(self, entry: ClientEntry) -> ClientData:
        tensors, spec = self.tensors(entry.id), self.manifest.spec
        train, validation, test = (
            normalized_split(
                {key: tensors[input_key(split, key)] for key in spec.inputs}, tensors.get(f"{split}_y"), spec
            )
            for split in SPLITS
        )
        return ClientData(entry.id, train, validation, test, spec.classes)


class OwnDataset(FederatedDataset):
    """Clients with their own data, each in the folder that its owner packed.

    The manifest may also have clients whose data are elsewhere.
    """

    hint: ClassVar = AGAIN

    def __init__(self, clients: OwnClients, manifest: Manifest) -> None:
        super().__init__(next(iter(clients.folders.values())), manifest)
        self.clients = clients

    def described_by(self, manifest: Manifest) -> OwnDataset:
        """Return the same data under another manifest."""
        return OwnDataset(self.clients, manifest)

    def shard_file(self, client: str) -> Path:
        """Return the path of a client's shard, in its own folder."""
        return self.clients.folders[client] / SHARD

    def _shard(self, entry: ClientEntry) -> bytes:
        if entry.id not in self.clients.cards:
            raise DataError(f"the data of client {entry.id} are missing; give its folder with {argument('packed')}")
        return read_own_shard(self.clients.folders[entry.id], self.clients.cards[entry.id])


def normalized_split(x: Mapping[str, Tensor], y: Tensor | None, spec: DataSpec) -> Split:
    """Return examples as a client's model gets them, from inputs by name and targets as shards hold them."""
    inputs = {name: normalize(x[name], each) for name, each in spec.inputs.items()}
    return Split(inputs.get("", inputs), None if y is None else targets_of(y, spec.targets))


def normalize(x: Tensor, spec: InputSpec) -> Tensor:
    """Standardize an input tensor; the result has the same shape.

    Pixels, uint8 ``[n, channels, ...]``, are scaled to 0 ... 1 and standardized per channel; features, float32
    ``[n, ...]``, are standardized per entry of the channel axis; tokens and integers are returned unchanged.
    """
    return x if spec.kind in ("tokens", "integers") else standardize(x, spec)


def standardize(x: Tensor, spec: InputSpec) -> Tensor:
    """Standardize pixels, features or integers ``[n, *shape]``; same shape, float32."""
    mean = torch.tensor(spec.normalization.mean, dtype=torch.float32).reshape(spec.broadcast)
    std = torch.tensor(spec.normalization.std, dtype=torch.float32).reshape(spec.broadcast)
    values = x.float() / 255 if spec.kind == "pixels" else x.to(torch.float32, copy=True)
    return values.sub_(mean).div_(std)


def targets_of(y: Tensor, targets: Targets | None) -> Tensor:
    """Return targets as a client's model gets them (:class:`Split`), from those that a shard holds."""
    if targets is None:
        return y
    if targets.kind.is_number:
        shape = targets.shape if targets.values == 1 else ()
        mean, std = (torch.tensor(each, dtype=torch.float32).reshape(shape) for each in (targets.mean, targets.std))
        return (y - mean) / std
    return y.float() if targets.kind.is_binary else y.long()
