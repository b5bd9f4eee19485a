"""Data of a client that is not part of a run and requests a model: arrays, or a packed folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedloom.core.words import composed
from fedloom.data.federated import ClientData, FederatedDataset, Split, normalized_split
from fedloom.data.inputs import take
from fedloom.data.local import log_notes
from fedloom.data.manifest import CLIENT_ID, SPLITS, VERSION, ClientEntry, Manifest
from fedloom.data.own import AGAIN, check_features, read_card, read_own_shard, same_names
from fedloom.data.pack.arrays import array_columns
from fedloom.data.pack.examples import Request, ValidationErrors
from fedloom.data.pack.packer import examples_of
from fedloom.data.problem import Problem
from fedloom.data.spec import RawInputs, input_key, named_arrays
from fedloom.data.values import EXACT, as_array
from fedloom.errors import DataError

MOST_EXAMPLES = 1_000_000
"""Maximum number of examples of a client: more would fill its memory without improving its description."""


class Newcomer(FederatedDataset):
    """Data set of one client that never trains.

    Parameters
    ----------
    client
        Its id.
    x
        Inputs as shards hold them.
    y
        Targets as shards hold them, or None.
    problem
        Requirements of the run, which the data meet.
    """

    def __init__(self, client: str, x: RawInputs, y: NDArray[Any] | None, problem: Problem) -> None:
        if not CLIENT_ID.fullmatch(client):
            raise DataError(
                f"client {client[:80]!r} must be up to 128 letters, digits, '.', '_' and '-'.", key="client"
            )
        spec, inputs = problem.spec, {name: _tensor(each) for name, each in named_arrays(x).items()}
        size = _checked_size(next(iter(inputs.values())))
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
        train = normalized_split(inputs, None if y is None else _tensor(y), spec)
        empty = Split(take(train.x, slice(0, 0)), None if train.y is None else train.y[:0])
        self._loaded[client] = ClientData(client, train, empty, empty, spec.classes)

    @classmethod
    def from_arrays(
        cls, client: str, x: Any, y: Any, problem: Problem, features: tuple[str, ...] | None = None
    ) -> Newcomer:
        """Accept tensors, arrays, or anything numpy converts to arrays, or a dict of them, as packing does.

        ``x`` is ``[n, *input_shape]``, raw, or such arrays by name; ``y`` the targets of the run's task, in their own
        units (labels may be class names), or None. A DataFrame must have the columns ``features``, in order; None: any.

        Raise DataError if the data do not meet the requirements.
        """
        columns = None if (names := getattr(x, "columns", None)) is None else tuple(map(str, names))
        if columns is not None and features is not None and not same_names(columns, features):
            raise DataError(
                f"x has the columns {', '.join(columns)}; they must be {', '.join(features)}, in this order"
            )
        arrays: dict[str, RawInputs] = {
            "x": {name: as_array(each, f"x[{name!r}]") for name, each in x.items()}
            if isinstance(x, Mapping)
            else as_array(x, "x")
        }
        for each in named_arrays(arrays["x"]).values():
            _checked_size(each)
        if y is not None:
            arrays["y"] = as_array(y, "y")
        # Integers of new clients may exceed those of the data.
        spec = problem.spec
        inputs = {
            name: replace(each, high=EXACT + 1) if each.kind == "integers" else each
            for name, each in spec.inputs.items()
        }
        request = Request(replace(spec, inputs=inputs), labelled=y is not None, needed_by="the run")
        errors = ValidationErrors("the data", outcome="")
        examples = examples_of(array_columns([(None, arrays)], None, request, errors), request, errors)
        errors.refuse()
        if (fault := examples.spec.mismatch(spec, "the run", skip=() if y is not None else ("targets",))) is not None:
            raise DataError(f"y: {fault}", key="y")
        log_notes(examples.notes)
        return cls(client, examples.x, examples.y, problem)

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
            tensors = safetensors.numpy.load(read_own_shard(folder, card))
        except SafetensorError as error:
            raise DataError(f"{folder}: the shard is damaged: {error}", hint=AGAIN) from error
        y = tensors.get("train_y")
        if y is not None and names:
            y = np.array([place[name] for name in names])[y]
        return cls(card.id, {name: tensors[input_key("train", name)] for name in card.spec.inputs}, y, problem)

    @property
    def client_id(self) -> str:
        """Id of the client."""
        return self.manifest.clients[0].id

    def verify(self, clients: object = None) -> None:
        """Do nothing, since the data were checked on construction."""


def _checked_size(x: NDArray[Any] | torch.Tensor) -> int:
    """Return the number of examples; raise DataError if there are none, or too many to convert."""
    size = len(x) if x.ndim else 1
    if not 1 <= size <= MOST_EXAMPLES:
        raise DataError(f"x has {size:,} examples; give 1 to {MOST_EXAMPLES:,}.", key="x")
    return size


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.require(array, requirements="W"))
