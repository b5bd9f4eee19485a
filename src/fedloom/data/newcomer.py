"""Data of a client that is not part of a run and requests a model: arrays, or a packed folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from fedloom.core.words import composed
from fedloom.data.federated import ClientData, FederatedDataset, Split, normalized_split
from fedloom.data.input_spec import DTYPES, InputSpec, input_key, unnamed
from fedloom.data.inputs import Inputs, take
from fedloom.data.manifest import CLIENT_ID, SPLITS, VERSION, ClientEntry, Manifest
from fedloom.data.own import AGAIN, check_features, read_card, read_own_shard, same_names
from fedloom.data.pack.arrays import with_channels
from fedloom.data.pack.examples import ValidationErrors
from fedloom.data.pack.labels import label_positions
from fedloom.data.pack.packer import pixel_classes, tokens_to_predict
from fedloom.data.problem import Problem
from fedloom.data.spec import DataSpec
from fedloom.data.values import EXACT, Rounding, as_array, as_numbers
from fedloom.errors import DataError

log = logging.getLogger("fedloom.data")

MOST_EXAMPLES = 1_000_000
"""Maximum number of examples of a client: more would fill its memory without improving its description."""


class Newcomer(FederatedDataset):
    """Data set of one client that never trains; raise DataError if its data do not meet the run's requirements.

    Parameters
    ----------
    client
        Its id.
    x
        ``[n, *input_shape]``, raw: pixels uint8, features float32, tokens uint8, integers int64; or such tensors by
        name.
    y
        ``[n]`` int64, or other targets of the run's task, in their own units; or None.
    problem
        Requirements of the run.
    """

    def __init__(self, client: str, x: Inputs, y: Tensor | None, problem: Problem) -> None:
        if not CLIENT_ID.fullmatch(client):
            raise DataError(
                f"client {client[:80]!r} must be up to 128 letters, digits, '.', '_' and '-'.", key="client"
            )
        spec = problem.spec
        inputs = _stored_inputs(x, spec)
        size = len(next(iter(inputs.values())))
        y = None if y is None else _stored_targets(y, spec)
        arrays = unnamed({name: each.numpy() for name, each in inputs.items()})
        if (fault := spec.examples_fault(arrays, None)) is not None:
            raise DataError(f"x: {fault}", key="x")
        if y is not None and (fault := spec.examples_fault(arrays, y.numpy())) is not None:
            raise DataError(f"y: {fault}", key="y")
        counts = dict.fromkeys(SPLITS, (0,) * spec.classes)
        manifest = Manifest(
            version=VERSION,
            dataset=problem.dataset,
            spec=spec,
            scheme={"scheme": "newcomer"},
            seed=0,
            held_out_fraction=0.0,
            validation_fraction=0.0,
            source_sha256={},
            clients=(ClientEntry(client, False, size, 0, 0, counts, "0" * 64),),
        )
        super().__init__(Path(), manifest)
        train = normalized_split(inputs, y, spec)
        nothing = Split(take(train.x, slice(0, 0)), None if train.y is None else train.y[:0])
        self._loaded[client] = ClientData(client, train, nothing, nothing, spec.classes)

    @classmethod
    def from_arrays(
        cls, client: str, x: Any, y: Any, problem: Problem, features: tuple[str, ...] | None = None
    ) -> Newcomer:
        """Accept tensors, arrays, or anything numpy converts to arrays, or a dict of them; labels may be class names.

        A DataFrame must have the columns ``features``, in order; None: any.

        Raise DataError if the data do not meet the requirements.
        """
        columns = None if (names := getattr(x, "columns", None)) is None else tuple(map(str, names))
        if columns is not None and features is not None and not same_names(columns, features):
            raise DataError(
                f"x has the columns {', '.join(columns)}; they must be {', '.join(features)}, in this order"
            )
        named = {f"x[{name!r}]": (name, each) for name, each in x.items()} if isinstance(x, Mapping) else {"x": ("", x)}
        inputs: dict[str, Tensor] = {}
        for what, (name, each) in named.items():
            array = as_array(each, what)
            spec = problem.spec.inputs.get(name)
            if spec is not None and spec.kind == "pixels":
                array = with_channels(array)
            inputs[name] = _tensor(array, what)
        labels = None if y is None else _positions(_converted(as_array(y, "y"), inputs, problem.spec), problem.spec)
        return cls(client, inputs.get("", inputs), labels, problem)

    @classmethod
    def from_folder(cls, folder: Path, problem: Problem, features: tuple[str, ...] | None = None) -> Newcomer:
        """Read the train split of a packed client (``fedloom data pack``).

        Its classes may be a subset of the run's: labels are matched by class name. A table must have the columns
        ``features``, in order; None: any.

        Raise DataError if the folder is missing, damaged, or does not meet the requirements.
        """
        card = read_card(folder)
        skip = ("classes",) if card.labelled else ("classes", "targets")
        if (fault := card.spec.mismatch(problem.spec, "the run", skip=skip)) is not None:
            raise DataError(f"{folder}: {fault}")
        check_features(folder, card, features)
        names = [composed(name) for name in card.spec.class_names] if card.labelled else []
        place = {composed(name): i for i, name in enumerate(problem.spec.class_names)}
        if foreign := [name for name in names if name not in place]:
            raise DataError(
                f"{folder}: the class {foreign[0]!r} is unknown to the run; its classes are "
                f"{', '.join(problem.spec.class_names)}"
            )
        try:
            tensors = safetensors.torch.load(read_own_shard(folder, card))
            x = {name: tensors[input_key("train", name)] for name in card.spec.inputs}
        except (SafetensorError, KeyError) as error:
            raise DataError(f"{folder}: the shard is damaged: {error}", hint=AGAIN) from error
        y = tensors.get("train_y")
        if y is not None and names:
            y = torch.tensor([place[name] for name in names])[_whole(y, "y", len(names) - 1).long()]
        return cls(card.id, x.get("", x), y, problem)

    @property
    def client_id(self) -> str:
        """Id of the client."""
        return self.manifest.clients[0].id

    def verify(self, clients: object = None) -> None:
        """Do nothing, since the data were checked on construction."""


def _stored_inputs(x: Inputs, spec: DataSpec) -> dict[str, Tensor]:
    """Return inputs by name, in the types in which shards hold them; raise DataError if values or names do not fit."""
    named = {"": x} if isinstance(x, Tensor) else dict(x)
    if set(named) != set(spec.inputs):
        has, needs = (", ".join(sorted(filter(None, each))) or "one tensor" for each in (named, spec.inputs))
        raise DataError(f"x has {has}; the run's inputs are {needs}", key="x")
    return {name: _stored(named[name], f"x[{name!r}]" if name else "x", each) for name, each in spec.inputs.items()}


def _stored(x: Tensor, what: str, spec: InputSpec) -> Tensor:
    if x.dim() == 0 or x.shape[1:] != spec.shape:
        needed = ", ".join(map(str, ("n", *spec.shape)))
        raise DataError(f"{what} has the shape {list(x.shape)}; it must be [{needed}].", key="x")
    if not 1 <= len(x) <= MOST_EXAMPLES:
        raise DataError(f"{what} has {len(x):,} examples; give 1 to {MOST_EXAMPLES:,}.", key="x")
    if spec.kind != "features":
        most = EXACT if spec.kind == "integers" else 255
        return torch.from_numpy(_whole(x, what, most).numpy().astype(DTYPES[spec.kind]))
    try:
        values = as_numbers((x.double() if x.is_floating_point() else x).numpy())
    except ValueError as error:
        raise DataError(f"{what}: {error}; features are numbers") from None
    kept = x.float()
    rounding = Rounding(spec.numbers)  # judged like the run's training data
    rounding.add(spec.rows(values).T, spec.rows(kept.numpy()).T)
    if lost := rounding.lost(spec.normalization.std):
        raise DataError(
            f"{what}[:, {lost[0]}]: values of this size lose too much precision as 32-bit floats; scale them like the "
            "run's data"
        )
    return kept


def _stored_targets(y: Tensor, spec: DataSpec) -> Tensor:
    """Return targets in the type in which shards hold them; raise DataError for other values."""
    targets = spec.targets
    if targets is None:
        return _whole(y, "y", spec.classes - 1).long()
    if targets.task == "regression":
        if y.is_complex():
            raise DataError(f"y is {y.dtype}; targets are numbers.", key="y")
        return y.float()
    whole = y.long() if y.dtype == torch.bool or bool((y == y.round()).all()) else y
    counted = whole if targets.ignored is None else whole.where(whole != targets.ignored, 0)
    _whole(counted, "y", 1 if targets.task == "multilabel" else targets.outputs - 1)
    return torch.from_numpy(whole.numpy().astype(targets.stored))


def _whole(values: Tensor, name: str, most: int) -> Tensor:
    """Return integers; reject other numbers, and integers outside 0 to ``most``."""
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise DataError(f"{name} is {values.dtype}; values must be whole numbers from 0 to {most}.", key=name)
    array = values.numpy()  # torch cannot compute these for unsigned types
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= most:
        raise DataError(f"{name} has values from {array.min()} to {array.max()}; they must be 0 to {most}.", key=name)
    return values


def _converted(y: NDArray[Any], inputs: Mapping[str, Tensor], spec: DataSpec) -> NDArray[Any]:
    """Return targets changed as packing changes them: black and white masks, and tokens that equal the inputs."""
    if spec.targets is not None and y.shape[1:] == spec.targets.shape:
        if spec.targets.task == "segmentation":
            masks, notes = pixel_classes(y, spec.targets.outputs, "y")
            for note in notes:
                log.warning("y: %s", note)
            return masks
        if spec.targets.task == "next_token":
            return tokens_to_predict({name: x.numpy() for name, x in inputs.items()}, y)[0]
    return y


def _positions(y: NDArray[Any], spec: DataSpec) -> Tensor:
    """Return class names or positions as positions in the run's classes, and other targets unchanged."""
    if y.ndim != 1 or not spec.class_names:
        return _tensor(y, "y")  # checked with its task
    errors = ValidationErrors("y", outcome="")
    in_order = spec.kind == "tokens"
    positions, _ = label_positions(y, spec.class_names, lambda i: f"y[{i}]", errors, in_order=in_order)
    errors.refuse()
    return torch.from_numpy(positions)


def _tensor(array: NDArray[Any], what: str) -> Tensor:
    array = np.ascontiguousarray(array)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)  # torch takes no other byte order
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError as error:
        raise DataError(f"{what} has values of type {array.dtype}; give an array of numbers") from error
