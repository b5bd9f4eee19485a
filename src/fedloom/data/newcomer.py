"""Data of a client that is not part of a run and requests a model: arrays, or a packed folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from fedloom.core.words import composed
from fedloom.data.federated import ClientData, FederatedDataset, Split, normalize
from fedloom.data.manifest import CLIENT_ID, SPLITS, VERSION, ClientEntry, Kind, Manifest, Normalization
from fedloom.data.own import AGAIN, check_features, is_same, read_card, read_own_shard
from fedloom.data.pack.arrays import numbered, with_channels
from fedloom.data.pack.examples import ValidationErrors
from fedloom.data.problem import Problem
from fedloom.data.values import Rounding, as_array, as_numbers
from fedloom.errors import DataError

MOST_EXAMPLES = 1_000_000
"""Maximum examples of a client: more would not describe it better and would fill its memory."""


@dataclass(frozen=True)
class Wanted:
    """Requirements on a client's data.

    Attributes
    ----------
    dataset, kind, input_shape, class_names, normalization
        As in :class:`~fedloom.data.manifest.Manifest`.
    features
        As in :class:`~fedloom.data.own.Own`.
    """

    dataset: str
    kind: Kind
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    normalization: Normalization
    features: tuple[str, ...] | None = None

    @classmethod
    def of(cls, problem: Problem, features: tuple[str, ...] | None) -> Wanted:
        """Return the requirements of a run's problem, with the columns of its experiment."""
        return cls(
            problem.dataset,
            problem.kind,
            problem.input_shape,
            problem.class_names,
            problem.normalization,
            features,
        )


class Newcomer(FederatedDataset):
    """Data set of one client that never trains.

    Parameters
    ----------
    client
        Its id.
    x
        ``[n, *input_shape]``, raw: pixels uint8, features float32, tokens uint8.
    y
        ``[n]`` int64, or None.

    Raises
    ------
    DataError
        If the data do not meet the requirements.
    """

    def __init__(self, client: str, x: Tensor, y: Tensor | None, wanted: Wanted) -> None:
        if not CLIENT_ID.fullmatch(client):
            raise DataError(
                f"client {client[:80]!r} must be up to 128 letters, digits, '.', '_' and '-'.", key="client"
            )
        x, y = checked_inputs(x, wanted), None if y is None else checked_labels(y, len(x), len(wanted.class_names))
        counts = {split: (0,) * len(wanted.class_names) for split in SPLITS}
        manifest = Manifest(
            version=VERSION,
            dataset=wanted.dataset,
            classes=len(wanted.class_names),
            class_names=wanted.class_names,
            input_shape=wanted.input_shape,
            kind=wanted.kind,
            scheme={"scheme": "newcomer"},
            seed=0,
            held_out_fraction=0.0,
            validation_fraction=0.0,
            normalization=wanted.normalization,
            source_sha256={},
            clients=(ClientEntry(client, False, len(x), 0, 0, counts, "0" * 64),),
        )
        super().__init__(Path(), manifest)
        train = Split(normalize(x, wanted.kind, wanted.normalization), y)
        nothing = Split(train.x[:0], None if y is None else y[:0])
        self._loaded[client] = ClientData(client, train, nothing, nothing, len(wanted.class_names))

    @classmethod
    def from_arrays(cls, client: str, x: Any, y: Any, wanted: Wanted) -> Newcomer:
        """Accept tensors, arrays, or anything numpy converts to arrays; labels may be class names.

        Raise DataError if the data do not meet the requirements.
        """
        columns = None if (names := getattr(x, "columns", None)) is None else tuple(map(str, names))
        if columns is not None and wanted.features is not None and not is_same(columns, wanted.features):
            raise DataError(
                f"x has the columns {', '.join(columns)}; they must be {', '.join(wanted.features)}, in this order"
            )
        inputs = as_array(x, "x")
        if wanted.kind == "pixels":
            inputs = with_channels(inputs)
        return cls(client, _tensor(inputs, "x"), None if y is None else _positions(as_array(y, "y"), wanted), wanted)

    @classmethod
    def from_folder(cls, folder: Path, wanted: Wanted) -> Newcomer:
        """Read the train split of a packed client (``fedloom data pack``).

        Its classes may be a subset of the run's: labels are matched by class name.

        Raise DataError if the folder is missing, damaged, or does not meet the requirements.
        """
        card = read_card(folder)
        for what, found, needed in (
            ("kind", card.kind, wanted.kind),
            ("input_shape", list(card.input_shape), list(wanted.input_shape)),
        ):
            if found != needed:
                raise DataError(f"{folder}: {what} is {found}, and must be {needed} as in the run")
        check_features(folder, card, wanted.features)
        place = {composed(name): i for i, name in enumerate(wanted.class_names)}
        foreign = [name for name in card.classes if composed(name) not in place] if card.labelled else []
        if foreign:
            raise DataError(
                f"{folder}: the class {foreign[0]!r} is unknown to the run; its classes are "
                f"{', '.join(wanted.class_names)}"
            )
        try:
            tensors = safetensors.torch.load(read_own_shard(folder, card))
            x = tensors["train_x"]
        except (SafetensorError, KeyError) as error:
            raise DataError(f"{folder}: the shard is damaged: {error}", hint=AGAIN) from error
        y = tensors.get("train_y")
        if y is not None and card.labelled:
            places = torch.tensor([place[composed(name)] for name in card.classes])
            y = places[checked_labels(y, len(x), len(card.classes))]
        return cls(card.id, x, y, wanted)

    @property
    def client_id(self) -> str:
        """Id of the client."""
        return self.manifest.clients[0].id

    def verify(self, clients: object = None) -> None:
        """Do nothing, since the data were checked on construction."""


def checked_inputs(x: Tensor, wanted: Wanted) -> Tensor:
    """Return inputs in the form that the run's shards have.

    Raise DataError if the kind, shape, number or range differs.
    """
    shape = list(wanted.input_shape)
    if list(x.shape[1:]) != shape or x.dim() == 0:
        raise DataError(f"x has the shape {list(x.shape)}; it must be [n, {', '.join(map(str, shape))}].", key="x")
    if not 1 <= len(x) <= MOST_EXAMPLES:
        raise DataError(f"x has {len(x):,} examples; give 1 to {MOST_EXAMPLES:,}.", key="x")
    if wanted.kind == "features":
        return _features(x, wanted.normalization.std)
    most = 255 if wanted.kind == "pixels" else len(wanted.class_names) - 1
    return _whole(x, "x", wanted.kind, most).to(torch.uint8)


def checked_labels(y: Tensor, examples: int, classes: int) -> Tensor:
    """Return labels as int64; raise DataError if they are not one class per example."""
    if not classes:
        raise DataError("y must be left out, because the run's data have no classes.", key="y")
    if list(y.shape) != [examples]:
        raise DataError(f"y has the shape {list(y.shape)}; it must be [{examples}], a label for each example.", key="y")
    return _whole(y, "y", "labels", classes - 1).long()


def _whole(values: Tensor, name: str, what: str, most: int) -> Tensor:
    """Return integers; refuse other numbers, and those outside of 0 to ``most``."""
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise DataError(f"{name} is {values.dtype}; {what} must be whole numbers from 0 to {most}.", key=name)
    array = values.numpy()  # torch cannot compute these for unsigned types
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > most:
        raise DataError(f"{name} has {what} from {low} to {high}; they must be from 0 to {most}.", key=name)
    return values


def _features(x: Tensor, spread: Sequence[float]) -> Tensor:
    """Return features as 32-bit floats, by the same rule as the run's training data.

    Parameters
    ----------
    spread
        Standard deviations ``[f]`` of the training data.
    """
    try:
        values = as_numbers((x.double() if x.is_floating_point() else x).numpy())
    except ValueError as error:
        raise DataError(f"x: {error}; features are numbers") from None
    kept = x.float()
    if not bool(kept.isfinite().all()):
        raise DataError(
            f"x has the feature {kept[~kept.isfinite()][0]}; features must be finite 32-bit floats.", key="x"
        )
    rounding = Rounding(len(spread))
    rounding.add(values, kept.numpy())
    if lost := rounding.lost(spread):
        raise DataError(
            f"x[:, {lost[0]}]: 32-bit floats cannot distinguish values of this size as the run's models do; scale them "
            "like the run's data"
        )
    return kept


def _positions(y: NDArray[Any], wanted: Wanted) -> Tensor:
    """Return labels as positions in the run's classes; they may be the names of these."""
    if y.ndim != 1 or not wanted.class_names:
        return _tensor(y, "y")  # refused for that
    errors = ValidationErrors("y", outcome="")
    found, _ = numbered([y], wanted.class_names, wanted.kind, lambda i: f"y[{i}]", errors)
    errors.refuse()
    return torch.from_numpy(found)


def _tensor(array: NDArray[Any], what: str) -> Tensor:
    array = np.ascontiguousarray(array)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)  # torch knows the machine's own order alone
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError as error:
        raise DataError(f"{what} has values of type {array.dtype}; give an array of numbers") from error
