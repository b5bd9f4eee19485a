"""Clients with their own data: what an experiment requires of them, their cards, and their manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from fedloom.core import digests
from fedloom.core.settings import Settings
from fedloom.core.words import composed, first_of
from fedloom.data.folders import check_digest, parse_document, read_stored
from fedloom.data.manifest import VERSION, ClientEntry, ClientId, Manifest, Sha256, Size
from fedloom.data.moments import Moments, pooled_normalization
from fedloom.data.spec import NOTHING, ChannelAxis, DataSpec, InputSpec, Kind, Normalization, Targets
from fedloom.errors import DataError, argument
from fedloom.tasks.names import KINDS, TaskName

AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Numbers: TypeAlias = Annotated[tuple[float, ...], AsTuple]
Words: TypeAlias = Annotated[tuple[str, ...], AsTuple]

TOKENIZER = (
    "For integers made of texts: digest of the tokenizer that every client must use, as `fedloom data pack` prints it; "
    "null: any."
)
"""Description of a key."""


class GivenNormalization(Settings):
    """Normalization given in advance: of the inputs (named ones sorted by name), then of the targets of regression."""

    mean: Numbers = Field(description="Mean of each channel (of pixels scaled to 0 ... 1) or feature, then target.")
    std: Numbers = Field(description="Standard deviation of each channel or feature, above 0.")


class NamedInput(Settings):
    """Requirements on one of several named inputs."""

    kind: Literal["pixels", "features", "integers"] = Field(description="Kind of input (docs/data.md).")
    shape: Annotated[tuple[int, ...], AsTuple] = Field(description="Shape of one input.")
    channel_axis: ChannelAxis = Field(
        default="first", description="Axis along which it is standardized: first or last."
    )
    high: int | None = Field(default=None, ge=1, description="Exclusive upper bound of integers.")
    tokenizer: str | None = Field(default=None, description=TOKENIZER)

    @property
    def spec(self) -> InputSpec:
        """Description of the input, without a normalization."""
        return InputSpec(self.kind, self.shape, NOTHING, self.channel_axis, self.high, self.tokenizer)


class OwnTargets(Settings):
    """Requirements on targets that are not classes."""

    task: TaskName = Field(description="Task of the targets: any but classification, which has classes.")
    shape: Annotated[tuple[int, ...], AsTuple] = Field(
        default=(),
        description="Shape of one target: [labels], [] or [numbers], [height, width], or [tokens].",
    )
    outputs: int | None = Field(
        default=None,
        ge=1,
        description="Number of labels, numbers, classes of a pixel, or tokens; null, for labels and numbers: from the "
        "shape.",
    )
    names: Words = Field(default=(), description="Names of the labels, numbers or classes; empty: none.")

    @property
    def targets(self) -> Targets:
        """Description of the targets, without a normalization."""
        return Targets(self.task, self.shape, self.outputs or math.prod(self.shape), self.names)

    @model_validator(mode="after")
    def _check_keys(self) -> OwnTargets:
        if self.outputs is None and KINDS[self.task].like is not None:
            raise ValueError(f"outputs: {self.task} needs the number of classes or tokens")
        return self


class Own(Settings):
    """Requirements on every client's data."""

    kind: Kind = Field(
        description="Kind of input: pixels, features, tokens, integers, or named for several inputs (docs/data.md)."
    )
    input_shape: Annotated[tuple[int, ...], AsTuple] = Field(
        default=(),
        description="Shape of one input: [channels, height, width], [features] or any axes, or [tokens]; empty for "
        "named inputs.",
    )
    channel_axis: ChannelAxis = Field(
        default="first", description="Axis along which features and integers are standardized: first or last."
    )
    high: int | None = Field(default=None, ge=1, description="Exclusive upper bound of integers.")
    tokenizer: str | None = Field(default=None, description=TOKENIZER)
    inputs: dict[str, NamedInput] | None = Field(default=None, description="Named inputs, by name; null: a single one.")
    classes: Words = Field(
        default=(), description="Names of the classes, in label order; for tokens, the vocabulary. Empty with targets."
    )
    targets: OwnTargets | None = Field(default=None, description="Targets that are not classes; null: classes.")
    features: Words | None = Field(
        default=None, description="For tables: names of the columns of inputs, in order. Null: any."
    )
    normalization: Literal["measured"] | GivenNormalization = Field(
        default="measured",
        description="measured: mean and std of all clients' training examples, from the counts, sums and sums of "
        "squares that clients announce; or {mean, std}, each a list.",
    )

    @property
    def spec(self) -> DataSpec:
        """Inputs and targets, without normalizations."""
        if self.inputs is not None:
            inputs = {name: each.spec for name, each in sorted(self.inputs.items())}
        else:
            assert self.kind != "named", "checked: there are no named inputs"
            inputs = {"": InputSpec(self.kind, self.input_shape, NOTHING, self.channel_axis, self.high, self.tokenizer)}
        return DataSpec(inputs, self.classes, None if self.targets is None else self.targets.targets)

    @property
    def task(self) -> TaskName:
        """Name of the task that the targets are for."""
        return self.spec.task

    @model_validator(mode="after")
    def _check_keys(self) -> Own:
        if (self.kind == "named") != (self.inputs is not None) or (self.inputs is not None and self.input_shape):
            raise ValueError(f"kind: {self.kind}; named inputs need inputs, each with a shape, and others input_shape")
        if not self.classes and self.targets is None:
            raise ValueError("classes: the list is empty; give at least one name, or targets that are not classes")
        spec = self.spec
        if self.features is not None:
            if any(each.kind in ("pixels", "tokens") or len(each.shape) > 1 for each in spec.inputs.values()):
                raise ValueError(f"features: names are only for features and integers of a table (got {self.kind})")
            if len(set(map(composed, self.features))) != (
                numbers := sum(each.numbers for each in spec.inputs.values())
            ):
                raise ValueError(f"features: must be {numbers} different names (got {list(self.features)})")
        if isinstance(self.normalization, GivenNormalization):
            statistics = Normalization(self.normalization.mean, self.normalization.std)
            if not spec.with_normalization(statistics).is_normalized:
                raise ValueError(f"normalization: give {spec.numbers} means and deviations")
        return self


CARD = "client.json"
SHARD = "shard.safetensors"
CARD_VERSION: Final = 4
AGAIN = "pack it again: fedloom data pack SOURCE --out DIR --experiment EXPERIMENT"
OWN = "own"
"""Data-set name of clients with their own data, in manifests and summaries."""


@dataclass(frozen=True)
class ClientCard:
    """Content of ``client.json`` in a packed folder.

    Attributes
    ----------
    version
        Version of this format.
    id
        Id of the client, chosen by its owner.
    spec
        Inputs, without normalizations, and targets.
    labelled
        True if the examples have labels.
    train, validation, test, class_counts, sha256
        As in :class:`~fedloom.data.manifest.ClientEntry`.
    moments
        Moments of the training examples.
    division
        Origin of the splits: ``{"given": true}``, or seed and fractions.
    source
        Format of the source.
    features
        Column names of features, then of integers, from a table, in order. None: the source has no names.
    """

    version: Literal[4]
    id: ClientId
    spec: DataSpec
    labelled: bool
    train: Size
    validation: Size
    test: Size
    class_counts: Mapping[str, tuple[Size, ...]]
    sha256: Sha256
    moments: Moments
    division: Mapping[str, Any]
    source: str
    features: tuple[str, ...] | None = None

    def entry(self, *, seen: bool = True) -> ClientEntry:
        """Return the client's manifest entry; a client that is not seen is evaluated but never trains."""
        return ClientEntry(
            self.id, seen, self.train, self.validation, self.test, self.class_counts, self.sha256, owner=None
        )

    def to_json(self) -> str:
        """Return the JSON of ``client.json``."""
        document = _CARD.dump_python(self, mode="json")
        return digests.with_compact_digest(json.dumps(document, separators=(",", ":"), allow_nan=False))


_CARD = TypeAdapter(ClientCard)


def read_card(folder: Path) -> ClientCard:
    """Return the card of a packed folder; raise DataError if there is none, or it is damaged or of another version."""
    path = folder / CARD
    text = read_stored(path, "there is no packed client", AGAIN, shared=False)
    return parse_document(_CARD, text, str(path), CARD_VERSION, AGAIN)


@dataclass(frozen=True)
class OwnClients:
    """Packed folders that are served or used together, and their cards, by client id in order.

    ``observers`` are the ids of the clients that are evaluated but never train.
    """

    folders: Mapping[str, Path]
    cards: Mapping[str, ClientCard]
    observers: frozenset[str]

    @classmethod
    def open(cls, data: Sequence[Path], observe: Sequence[Path] = ()) -> OwnClients:
        """Read the cards, but no shard, of packed folders, or of folders that contain some.

        Clients in ``data`` train; clients in ``observe`` are only evaluated.

        Raise DataError if a folder is missing or damaged, a client occurs twice, or the clients' kinds of data differ.
        """
        folders: dict[str, tuple[Path, ClientCard, bool]] = {}
        for location, observer in [*((path, False) for path in data), *((path, True) for path in observe)]:
            for folder in _pack_folder(location):
                card = read_card(folder)
                if card.id in folders:
                    raise DataError(
                        f"client {card.id!r} is in {folders[card.id][0]} and in {folder}",
                        hint=f"pack one of them again with another {argument('id')}",
                    )
                folders[card.id] = folder, card, observer
        if not folders:
            raise DataError("no packed client was given", hint=AGAIN)
        clients = dict(sorted(folders.items()))
        first_folder, first, _ = next(iter(clients.values()))
        for folder, card, _ in clients.values():
            if (fault := card.spec.mismatch(first.spec, str(first_folder), skip=_absent(card, first))) is not None:
                raise DataError(f"{folder}: {fault}", hint=AGAIN)
        return cls(
            {name: folder for name, (folder, _, _) in clients.items()},
            {name: card for name, (_, card, _) in clients.items()},
            frozenset(name for name, (_, _, observer) in clients.items() if observer),
        )

    def check(self, own: Own) -> None:
        """Raise DataError if a client does not meet an experiment's requirements."""
        for name, card in self.cards.items():
            fault = card.spec.mismatch(own.spec, "data.own", exact=True, skip=_absent(card))
            if fault is not None:
                raise DataError(f"{self.folders[name]}: {fault}", hint=AGAIN)
            check_features(self.folders[name], card, own.features)

    def check_labels(self) -> None:
        """Raise DataError if a training client has no labels."""
        for name, card in self.cards.items():
            if name not in self.observers and not card.labelled:
                raise DataError(
                    f"{self.folders[name]} has no labels, which training needs; give labels, or use "
                    f"{argument('observe')}.",
                    hint=f"pack it again, without {argument('unlabelled')}",
                )

    @cached_property
    def entries(self) -> tuple[ClientEntry, ...]:
        """Manifest entries of the clients."""
        return tuple(card.entry(seen=name not in self.observers) for name, card in self.cards.items())

    def measured(self, own: Own) -> Normalization:
        """Return an experiment's normalization, measured on the training clients if required.

        Raise DataError if it must be measured and no client trains.
        """
        numbers = 0 if own.spec.targets is None else own.spec.targets.numbers
        cards = [card for name, card in self.cards.items() if name not in self.observers]
        training = [card.moments for card in cards if card.labelled or not numbers]
        return own_normalization(own, training)


def _absent(*cards: ClientCard) -> tuple[str, ...]:
    """Return the aspects in which one of the clients cannot differ, since it has no labels."""
    return () if all(card.labelled for card in cards) else ("targets",)


def check_features(folder: Path, card: ClientCard, expected: tuple[str, ...] | None) -> None:
    """Raise DataError if a table's columns differ from those of the experiment, or are in another order."""
    if expected is not None and card.features is not None and not same_names(card.features, expected):
        raise DataError(
            f"{folder}: features is {first_of(card.features, 12)}; data.own.features is {first_of(expected, 12)}",
            hint=AGAIN,
        )


def same_names(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return True if two lists of names are equal, except for the Unicode form of the names."""
    return [*map(composed, one)] == [*map(composed, other)]


def own_normalization(own: Own, moments: Sequence[Moments]) -> Normalization:
    """Return an experiment's normalization, given or measured from the moments of the clients that train.

    Raise DataError if it must be measured and no client trains.
    """
    if isinstance(own.normalization, GivenNormalization):
        return Normalization(own.normalization.mean, own.normalization.std)
    if not own.spec.numbers:
        return NOTHING
    if not moments:
        raise DataError("data.own.normalization is measured, but no client trains; give mean and std")
    return pooled_normalization(own.spec.measured, moments)


def own_manifest(own: Own, entries: Sequence[ClientEntry], seed: int, normalization: Normalization) -> Manifest:
    """Return the manifest of clients with their own data, in the order given.

    The normalization is that of the inputs and then of the targets; empty if it is not known yet.
    """
    return Manifest(
        version=VERSION,
        dataset=OWN,
        spec=own.spec.with_normalization(normalization),
        scheme={"scheme": OWN},
        seed=seed,
        held_out_fraction=0.0,
        validation_fraction=0.0,
        source_sha256={},
        clients=tuple(entries),
    )


def read_own_shard(folder: Path, card: ClientCard) -> bytes:
    """Return the bytes of a packed client's shard; raise DataError if it is missing, or does not match its hash."""
    path = folder / SHARD
    content = read_stored(path, f"the shard of client {card.id} is missing", AGAIN, shared=False)
    check_digest(content, card.sha256, f"the shard {path}", AGAIN)
    return content


def _pack_folder(location: Path) -> list[Path]:
    if (location / CARD).exists() or not location.is_dir():
        return [location]
    inside = sorted(path.parent for path in location.glob(f"*/{CARD}"))
    if not inside:
        raise DataError(f"no packed client: {location} must contain {CARD}, or folders with one", hint=AGAIN)
    return inside
