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
from fedloom.data.input_spec import InputSpec, input_fields, input_key, tokenizer_of
from fedloom.data.inputs import Inputs, take
from fedloom.data.manifest import CLIENT_ID, SPLITS, VERSION, ClientEntry, Manifest
from fedloom.data.own import AGAIN, ClientCard, check_features, is_same, read_card, read_own_shard
from fedloom.data.pack.arrays import with_channels
from fedloom.data.pack.examples import ValidationErrors
from fedloom.data.pack.labels import label_positions
from fedloom.data.pack.packer import pixel_classes, tokens_to_predict
from fedloom.data.problem import Problem
from fedloom.data.targets import Targets
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
        inputs = _checked_inputs(x, problem)
        size = len(next(iter(inputs.values())))
        y = None if y is None else _checked_targets(y, size, problem)
        counts = {split: (0,) * len(problem.class_names) for split in SPLITS}
        manifest = Manifest(
            version=VERSION,
            dataset=problem.dataset,
            classes=len(problem.class_names),
            class_names=problem.class_names,
            scheme={"scheme": "newcomer"},
            seed=0,
            held_out_fraction=0.0,
            validation_fraction=0.0,
            source_sha256={},
            clients=(ClientEntry(client, False, size, 0, 0, counts, "0" * 64),),
            targets=problem.targets,
            **input_fields(problem.specs),
        )
        super().__init__(Path(), manifest)
        train = normalized_split(inputs, y, problem.specs, problem.targets)
        nothing = Split(take(train.x, slice(0, 0)), None if train.y is None else train.y[:0])
        self._loaded[client] = ClientData(client, train, nothing, nothing, len(problem.class_names))

    @classmethod
    def from_arrays(
        cls, client: str, x: Any, y: Any, problem: Problem, features: tuple[str, ...] | None = None
    ) -> Newcomer:
        """Accept tensors, arrays, or anything numpy converts to arrays, or a dict of them; labels may be class names.

        A DataFrame must have the columns ``features``, in order; None: any.

        Raise DataError if the data do not meet the requirements.
        """
        columns = None if (names := getattr(x, "columns", None)) is None else tuple(map(str, names))
        if columns is not None and features is not None and not is_same(columns, features):
            raise DataError(
                f"x has the columns {', '.join(columns)}; they must be {', '.join(features)}, in this order"
            )
        named = {f"x[{name!r}]": (name, each) for name, each in x.items()} if isinstance(x, Mapping) else {"x": ("", x)}
        inputs: dict[str, Tensor] = {}
        for what, (name, each) in named.items():
            array = as_array(each, what)
            spec = problem.specs.get(name)
            if spec is not None and spec.kind == "pixels":
                array = with_channels(array)
            inputs[name] = _tensor(array, what)
        labels = None if y is None else _positions(_converted(as_array(y, "y"), inputs, problem.targets), problem)
        return cls(client, inputs.get("", inputs), labels, problem)

    @classmethod
    def from_folder(cls, folder: Path, problem: Problem, features: tuple[str, ...] | None = None) -> Newcomer:
        """Read the train split of a packed client (``fedloom data pack``).

        Its classes may be a subset of the run's: labels are matched by class name. A table must have the columns
        ``features``, in order; None: any.

        Raise DataError if the folder is missing, damaged, or does not meet the requirements.
        """
        card = read_card(folder)
        _check_same_data(folder, card, problem)
        check_features(folder, card, features)
        place = {composed(name): i for i, name in enumerate(problem.class_names)}
        foreign = [name for name in card.classes if composed(name) not in place] if card.labelled else []
        if foreign:
            raise DataError(
                f"{folder}: the class {foreign[0]!r} is unknown to the run; its classes are "
                f"{', '.join(problem.class_names)}"
            )
        try:
            tensors = safetensors.torch.load(read_own_shard(folder, card))
            x = {name: tensors[input_key("train", name)] for name in card.specs}
        except (SafetensorError, KeyError) as error:
            raise DataError(f"{folder}: the shard is damaged: {error}", hint=AGAIN) from error
        y = tensors.get("train_y")
        if y is not None and card.labelled and problem.targets is None:
            places = torch.tensor([place[composed(name)] for name in card.classes])
            y = places[checked_labels(y, card.train, len(card.classes))]
        return cls(card.id, x.get("", x), y, problem)

    @property
    def client_id(self) -> str:
        """Id of the client."""
        return self.manifest.clients[0].id

    def verify(self, clients: object = None) -> None:
        """Do nothing, since the data were checked on construction."""


def _check_same_data(folder: Path, card: ClientCard, problem: Problem) -> None:
    """Raise DataError if a packed client has data of another kind, shape or task than the run."""
    needed_targets = problem.targets and problem.targets.plain()
    for what, found, needed in (
        ("kind", card.kind, problem.kind),
        ("input_shape", list(card.input_shape), list(problem.input_shape)),
        ("inputs", _shapes(card.specs), _shapes(problem.specs)),
        ("targets", card.targets if card.labelled else needed_targets, needed_targets),
    ):
        if found != needed:
            raise DataError(f"{folder}: {what} is {found}; it must be {needed}, as in the run")
    tokenizer, needed_tokenizer = tokenizer_of(card.specs), tokenizer_of(problem.specs)
    if None not in (tokenizer, needed_tokenizer) and tokenizer != needed_tokenizer:
        raise DataError(f"{folder}: tokenizer is {tokenizer}; it must be {needed_tokenizer}, as in the run")


def _shapes(specs: Mapping[str, InputSpec]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (spec.kind, spec.shape) for name, spec in specs.items() if name}


def _checked_inputs(x: Inputs, problem: Problem) -> dict[str, Tensor]:
    """Return inputs by name, in the form that the run's shards have.

    Raise DataError if their names, kind, shape, number or range differ.
    """
    named = {"": x} if isinstance(x, Tensor) else dict(x)
    specs = problem.specs
    if set(named) != set(specs):
        found, needed = (", ".join(sorted(filter(None, each))) or "one tensor" for each in (named, specs))
        raise DataError(f"x has {found}; the run's inputs are {needed}", key="x")
    inputs = {
        name: _checked_input(named[name], f"x[{name!r}]" if name else "x", spec, len(problem.class_names))
        for name, spec in specs.items()
    }
    if len({len(each) for each in inputs.values()}) > 1:
        sizes = ", ".join(f"{len(each)} of {name}" for name, each in inputs.items())
        raise DataError(f"x has different numbers of examples ({sizes}); give the same number for each input", key="x")
    return inputs


def _checked_input(x: Tensor, what: str, spec: InputSpec, classes: int) -> Tensor:
    shape = list(spec.shape)
    if list(x.shape[1:]) != shape or x.dim() == 0:
        raise DataError(f"{what} has the shape {list(x.shape)}; it must be [n, {', '.join(map(str, shape))}].", key="x")
    if not 1 <= len(x) <= MOST_EXAMPLES:
        raise DataError(f"{what} has {len(x):,} examples; give 1 to {MOST_EXAMPLES:,}.", key="x")
    if spec.kind == "features":
        return _features(x, what, spec)
    if spec.kind == "integers":
        return _whole(x, what, spec.kind, EXACT).long()
    most = 255 if spec.kind == "pixels" else classes - 1
    return _whole(x, what, spec.kind, most).to(torch.uint8)


def _checked_targets(y: Tensor, examples: int, problem: Problem) -> Tensor:
    """Return targets in the form that the run's shards have; raise DataError if they are not those of its task."""
    targets = problem.targets
    if targets is None:
        return checked_labels(y, examples, len(problem.class_names))
    needed = [examples, *targets.shape]
    if list(y.shape) != needed:
        raise DataError(f"y has the shape {list(y.shape)}; {targets.task} needs {needed}.", key="y")
    if targets.task == "regression":
        if y.is_complex():
            raise DataError(f"y is {y.dtype}; targets are numbers.", key="y")
        kept = y.float()
    else:
        whole = y.long() if y.dtype == torch.bool or bool((y == y.round()).all()) else y
        most = 1 if targets.task == "multilabel" else targets.outputs - 1
        counted = whole if targets.ignored is None else whole.where(whole != targets.ignored, 0)
        _whole(counted, "y", "targets", most)
        kept = torch.from_numpy(whole.numpy().astype(targets.stored))
    if (fault := targets.values_fault(kept.numpy(), examples)) is not None:
        raise DataError(f"y: {fault}", key="y")
    return kept


def checked_labels(y: Tensor, examples: int, classes: int) -> Tensor:
    """Return labels as int64; raise DataError if they are not one class per example."""
    if not classes:
        raise DataError("y must be left out, because the run's data have no classes.", key="y")
    if list(y.shape) != [examples]:
        raise DataError(f"y has the shape {list(y.shape)}; it must be [{examples}], a label for each example.", key="y")
    return _whole(y, "y", "labels", classes - 1).long()


def _whole(values: Tensor, name: str, what: str, most: int) -> Tensor:
    """Return integers; reject other numbers, and integers outside 0 to ``most``."""
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise DataError(f"{name} is {values.dtype}; {what} must be whole numbers from 0 to {most}.", key=name)
    array = values.numpy()  # torch cannot compute these for unsigned types
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > most:
        raise DataError(f"{name} has {what} from {low} to {high}; they must be from 0 to {most}.", key=name)
    return values


def _features(x: Tensor, what: str, spec: InputSpec) -> Tensor:
    """Return features as 32-bit floats, by the same rule as the run's training data."""
    try:
        values = as_numbers((x.double() if x.is_floating_point() else x).numpy())
    except ValueError as error:
        raise DataError(f"{what}: {error}; features are numbers") from None
    kept = x.float()
    if not bool(kept.isfinite().all()):
        raise DataError(
            f"{what} has the feature {kept[~kept.isfinite()][0]}; features must be finite 32-bit floats.", key="x"
        )
    rounding = Rounding(spec.numbers)
    rounding.add(spec.rows(values).T, spec.rows(kept.numpy()).T)
    if lost := rounding.lost(spec.normalization.std):
        raise DataError(
            f"{what}[:, {lost[0]}]: values of this size lose too much precision as 32-bit floats; scale them like the "
            "run's data"
        )
    return kept


def _converted(y: NDArray[Any], inputs: Mapping[str, Tensor], targets: Targets | None) -> NDArray[Any]:
    """Return targets changed as packing changes them: black and white masks, and tokens that equal the inputs."""
    if targets is not None and y.shape[1:] == targets.shape:
        if targets.task == "segmentation":
            masks, notes = pixel_classes(y, targets.outputs, "y")
            for note in notes:
                log.warning("y: %s", note)
            return masks
        if targets.task == "next_token":
            return tokens_to_predict({name: x.numpy() for name, x in inputs.items()}, y)[0]
    return y


def _positions(y: NDArray[Any], problem: Problem) -> Tensor:
    """Return class names or positions as positions in the run's classes, and other targets unchanged."""
    if y.ndim != 1 or not problem.class_names:
        return _tensor(y, "y")  # checked with its task
    errors = ValidationErrors("y", outcome="")
    in_order = problem.kind == "tokens"
    positions, _ = label_positions(y, problem.class_names, lambda i: f"y[{i}]", errors, in_order=in_order)
    errors.refuse()
    return torch.from_numpy(positions)


def _tensor(array: NDArray[Any], what: str) -> Tensor:
    array = np.ascontiguousarray(array)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)  # torch takes no other byte order
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError as error:
        raise DataError(f"{what} has values of type {array.dtype}; give an array of numbers") from error
