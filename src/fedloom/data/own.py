"""Clients with their own data: an experiment's requirements, and the cards of packed clients."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedloom.core import digests
from fedloom.core.words import composed, pluralize
from fedloom.data.input_spec import (
    NOTHING,
    ChannelAxis,
    InputSpec,
    Kind,
    Normalization,
    input_fields,
    inputs_fault,
    specs_of,
    tokenizer_of,
    with_normalizations,
    without_defaults,
)
from fedloom.data.manifest import (
    SPLITS,
    VERSION,
    ClientEntry,
    Manifest,
    check_shard,
    entry_contradiction,
    read_stored,
    text_fault,
)
from fedloom.data.moments import Measured, Moments, divided_normalization, measured_tensors, pooled_normalization
from fedloom.data.requirements import Given, Own
from fedloom.data.targets import Targets, same_targets
from fedloom.errors import DataError, argument

CARD = "client.json"
SHARD = "shard.safetensors"
CARD_VERSION = 3
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
    kind, input_shape, classes
        As in the experiment: see :class:`Own`.
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
    channel_axis, high, tokenizer, inputs, targets
        As in :class:`~fedloom.data.manifest.Manifest`, without normalizations.
    """

    version: int
    id: str
    kind: Kind
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    labelled: bool
    train: int
    validation: int
    test: int
    class_counts: Mapping[str, tuple[int, ...]]
    sha256: str
    moments: Moments
    division: Mapping[str, Any]
    source: str
    features: tuple[str, ...] | None = None
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
    def normalization(self) -> Normalization:
        """No normalization: it depends on all clients."""
        return NOTHING

    @property
    def tokenizer_digest(self) -> str | None:
        """Digest of the tokenizer that made one of the inputs, or None."""
        return tokenizer_of(self.specs)

    @property
    def measured(self) -> list[Measured]:
        """Tensors that the moments are of."""
        return measured_tensors(self.specs, self.targets if self.labelled else None)

    def entry(self, *, seen: bool = True) -> ClientEntry:
        """Return the client's manifest entry; a client that is not seen is evaluated but never trains."""
        return ClientEntry(
            self.id, seen, self.train, self.validation, self.test, self.class_counts, self.sha256, owner=None
        )

    def to_json(self) -> str:
        """Return the JSON of ``client.json``: one key per line, and its digest."""
        known = without_defaults(dict(vars(self))) | {"moments": asdict(self.moments)}
        lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in known.items())
        return digests.with_digest(CARD, "{\n" + ",\n".join(lines) + "\n}\n")


_CARD = TypeAdapter(ClientCard)


def read_card(folder: Path) -> ClientCard:
    """Return the card of a packed folder; raise DataError if there is none, or it is damaged or of another version."""
    path = folder / CARD
    text = read_stored(path, "there is no packed client", AGAIN, shared=False)
    try:
        card = _CARD.validate_json(digests.without_digest(CARD, text))
    except (digests.Damaged, ValidationError) as error:
        raise DataError(f"{path} is damaged: {text_fault(error)}", hint=AGAIN) from error
    if (fault := _contradiction(card)) is not None:
        raise DataError(f"{path} is damaged: {fault}", hint=AGAIN)
    return card


def _contradiction(card: ClientCard) -> str | None:
    if card.version != CARD_VERSION:
        return f"version is {card.version}; it must be {CARD_VERSION}"
    if (fault := inputs_fault(card, normalized=False)) is not None:
        return fault
    if card.targets is not None and (card.classes or (fault := card.targets.fault(normalized=False)) is not None):
        return fault or "classes must be empty, because there are targets"
    columns = sum(spec.numbers for spec in card.specs.values())
    if card.features is not None and len(card.features) != columns:
        return f"features must have {columns} names"
    if (fault := _moments_fault(card)) is not None:
        return fault
    empty = next((split for split in SPLITS if card.entry().size(split) < 1), None)
    if empty is not None:
        return f"{empty} is {card.entry().size(empty)}; it must be at least 1"
    return entry_contradiction(card.entry(), len(card.classes))


def _moments_fault(card: ClientCard) -> str | None:
    numbers, moments = sum(each.numbers for each in card.measured), card.moments
    if not len(moments.sum) == len(moments.squares) == numbers:
        return f"moments must have {numbers} sums and squares"
    if not all(map(math.isfinite, (*moments.sum, *moments.squares))) or moments.count < 1:
        return "moments must have finite numbers and a count of at least 1"
    return None


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
        found: dict[str, tuple[Path, ClientCard, bool]] = {}
        for given, observer in [*((path, False) for path in data), *((path, True) for path in observe)]:
            for folder in _packed(given):
                card = read_card(folder)
                if card.id in found:
                    raise DataError(
                        f"client {card.id!r} is in {found[card.id][0]} and in {folder}",
                        hint=f"pack one of them again with another {argument('id')}",
                    )
                found[card.id] = folder, card, observer
        if not found:
            raise DataError("no packed client was given", hint=AGAIN)
        ordered = dict(sorted(found.items()))
        first_folder, first, _ = next(iter(ordered.values()))
        for folder, card, _ in ordered.values():
            check_same_data(folder, card, first, str(first_folder))
        return cls(
            {name: folder for name, (folder, _, _) in ordered.items()},
            {name: card for name, (_, card, _) in ordered.items()},
            frozenset(name for name, (_, _, observer) in ordered.items() if observer),
        )

    def check(self, own: Own) -> None:
        """Raise DataError if a client does not meet an experiment's requirements."""
        for name, card in self.cards.items():
            check_same_data(self.folders[name], card, own, "data.own")
            check_features(self.folders[name], card, own.features)
            needed, found = own.wanted, card.targets
            if card.labelled and not same_targets(found, needed):
                raise DataError(
                    f"{self.folders[name]}: targets is {_targets(found)}; data.own needs {_targets(needed)}", hint=AGAIN
                )

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
        needed = 0 if own.wanted is None else own.wanted.numbers
        cards = [card for name, card in self.cards.items() if name not in self.observers]
        training = [card.moments for card in cards if card.labelled or not needed]
        return own_normalization(own, training)


def check_same_data(folder: Path, card: ClientCard, needed: ClientCard | Own, where: str) -> None:
    """Raise DataError if the kind, shape, classes or tokenizer of a client's data differ from those needed."""
    for what in ("kind", "input_shape", "channel_axis", "high", "inputs", "classes"):
        if what == "high" and isinstance(needed, ClientCard):  # a client has some of the values
            continue
        found, wanted = getattr(card, what), getattr(needed, what)
        if what == "inputs":
            found, wanted = _named_inputs(card), _named_inputs(needed)
        if not is_same(found, wanted):
            raise DataError(f"{folder}: {what} is {_shown(found)}; {where} needs {_shown(wanted)}", hint=AGAIN)
    found, wanted = card.tokenizer_digest, tokenizer_of(needed.specs)
    unknown = found is None and isinstance(needed, ClientCard)
    if wanted is not None and found != wanted and not unknown:
        raise DataError(f"{folder}: tokenizer is {found}; {where} needs {wanted}", hint=AGAIN)


def _named_inputs(about: ClientCard | Own) -> Mapping[str, InputSpec] | None:
    """Return the descriptions of named inputs without the tokenizer, which is compared on its own."""
    if about.inputs is None:
        return None
    return {name: replace(spec, tokenizer=None) for name, spec in about.specs.items()}


def check_features(folder: Path, card: ClientCard, needed: tuple[str, ...] | None) -> None:
    """Raise DataError if a table's columns differ from those of the experiment, or are in another order."""
    if needed is not None and card.features is not None and not is_same(card.features, needed):
        raise DataError(
            f"{folder}: features is {_shown(card.features)}; data.own.features is {_shown(needed)}", hint=AGAIN
        )


def own_normalization(own: Own, moments: Sequence[Moments]) -> Normalization:
    """Return an experiment's normalization, given or measured from the moments of the clients that train.

    Raise DataError if it must be measured and no client trains.
    """
    if isinstance(own.normalization, Given):
        return Normalization(own.normalization.mean, own.normalization.std)
    if not own.numbers:
        return NOTHING
    if not moments:
        raise DataError("data.own.normalization is measured, but no client trains; give mean and std")
    return pooled_normalization(own.measured, moments)


def own_manifest(own: Own, entries: Sequence[ClientEntry], seed: int, found: Normalization) -> Manifest:
    """Return the manifest of clients with their own data, in the order given.

    The normalization is that of the inputs and then of the targets; empty if it is not known yet.
    """
    specs, targets = own.specs, own.wanted
    parts = divided_normalization(own.measured, found)
    if targets is not None and targets.numbers:
        targets = targets.normalized(parts.pop())
    return Manifest(
        version=VERSION,
        dataset=OWN,
        classes=len(own.classes),
        class_names=own.classes,
        scheme={"scheme": OWN},
        seed=seed,
        held_out_fraction=0.0,
        validation_fraction=0.0,
        source_sha256={},
        clients=tuple(entries),
        targets=targets,
        **input_fields(with_normalizations(specs, parts)),
    )


def read_own_shard(folder: Path, card: ClientCard) -> bytes:
    """Return the bytes of a packed client's shard; raise DataError if it is missing, or does not match its hash."""
    path = folder / SHARD
    content = read_stored(path, f"the shard of client {card.id} is missing", AGAIN, shared=False)
    check_shard(content, card.sha256, str(path), AGAIN)
    return content


def _packed(given: Path) -> list[Path]:
    if (given / CARD).exists() or not given.is_dir():
        return [given]
    inside = sorted(path.parent for path in given.glob(f"*/{CARD}"))
    if not inside:
        raise DataError(f"no packed client: {given} must contain {CARD}, or folders with one", hint=AGAIN)
    return inside


def is_same(one: object, other: object) -> bool:
    """Return True if two values of a card are equal; names may differ in their Unicode form."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return [composed(str(item)) for item in one] == [composed(str(item)) for item in other]
    return one == other


def _targets(targets: Targets | None) -> str:
    if targets is None:
        return "classes"
    named = f" {_shown(targets.names)}" if targets.names else ""
    return f"{targets.task} of shape {list(targets.shape)} with {targets.outputs} outputs{named}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {spec.kind} {list(spec.shape)}" for name, spec in value.items())
    if isinstance(value, tuple):
        words = [str(item) for item in value]
        text = ", ".join(words if len(words) <= 12 else [*words[:12], "..."])
        return f"[{text}]" if len(words) <= 12 else f"[{text}] ({pluralize(len(words), 'item')})"
    return str(value)
