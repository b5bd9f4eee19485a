"""Saved models of clients, ``ID.pt2``, for serving predictions: loaded on request, and the latest ones kept."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from fedloom.core.words import parsed_json, printable
from fedloom.data.manifest import CLIENT_ID
from fedloom.data.spec import DTYPES, DataSpec, InputSpec
from fedloom.errors import DataError
from fedloom.serving.personal_model import CARD

log = logging.getLogger("fedloom.serving.saved_models")

SUFFIX = ".pt2"
MODELS = "models"
"""Folder in a run's folder."""

_SPEC = TypeAdapter(DataSpec)
_State = tuple[int, int, int]


@dataclass(frozen=True)
class SavedModel:
    """Model of one client.

    Attributes
    ----------
    predict
        Maps an input ``[b, *shape]``, or a dict of named ones, to the outputs ``[b, *outputs]``.
    round, digest
        Round of the run, and SHA-256 of its checkpoint.
    classes
        Number of classes.
    specs
        Inputs by name; the name of a single one is empty.
    outputs, dtype
        Shape and type of the outputs of one example.
    """

    predict: Callable[[Any], Tensor]
    round: int
    digest: str
    classes: int
    specs: Mapping[str, InputSpec]
    outputs: tuple[int, ...]
    dtype: np.dtype[Any]


class ModelFolder:
    """Models in a folder, of which at most ``most`` are in memory. Only one thread may load at a time.

    The folder has a file ``ID.pt2`` for each client, of ``fedloom personalize --set format=pt2``; a replaced file is
    read again. Reading a file can run code that it contains, so the files must come from a trusted source.

    Raise DataError if the folder has no models.
    """

    def __init__(self, folder: Path, most: int = 64) -> None:
        self.folder = folder
        self._most = most
        self._lock = threading.Lock()
        self._models: OrderedDict[str, tuple[_State, SavedModel]] = OrderedDict()
        if not self.clients():
            raise DataError(
                f"{folder} has no models of clients ({SUFFIX}).",
                hint=f"write them where the clients' data are: fedloom personalize RUN --set format=pt2 --out {folder}",
            )

    def clients(self) -> list[str]:
        """Return the ids of the clients with a model."""
        names = (path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))
        return sorted(name for name in names if CLIENT_ID.fullmatch(name))

    def load(self, client: str) -> SavedModel:
        """Return a client's model; raise KeyError if there is none, DataError if its file is damaged."""
        state = self._state(client)
        if (kept := self.kept(client)) is not None:
            return kept
        model = _load(self.folder / f"{client}{SUFFIX}", client)
        with self._lock:
            self._models[client] = (state, model)
            while len(self._models) > self._most:
                self._models.popitem(last=False)
        return model

    def kept(self, client: str) -> SavedModel | None:
        """Return a client's model if it is in memory, or None; raise KeyError if there is no file of it."""
        state = self._state(client)
        with self._lock:
            entry = self._models.get(client)
            if entry is None or entry[0] != state:
                return None
            self._models.move_to_end(client)
            return entry[1]

    def _state(self, client: str) -> _State:
        try:
            if not CLIENT_ID.fullmatch(client):
                raise KeyError(client)
            file = (self.folder / f"{client}{SUFFIX}").stat()
        except OSError:
            raise KeyError(client) from None
        return (file.st_ino, file.st_size, file.st_mtime_ns)


def _load(path: Path, client: str) -> SavedModel:
    extra = {CARD: ""}
    try:
        program = torch.export.load(path, extra_files=extra).module()
        card = parsed_json(extra[CARD] or "{}")
        if not card:
            raise ValueError("it has no card; save it again with this version")
        if card["client"] != client:
            raise ValueError(f"it is the model of client {card['client']}")
        spec = _SPEC.validate_python(card["spec"])
        zeros = {
            name: torch.zeros((1, *each.shape), dtype=getattr(torch, str(DTYPES[each.kind])))
            for name, each in spec.inputs.items()
        }
        with torch.no_grad():
            outputs = program(zeros.get("", zeros)).numpy()
        facts = (int(card["round"]), str(card["digest"]), spec.classes)
    except Exception as error:  # torch raises any class for a damaged file
        log.warning("%s cannot be loaded: %s", path, error)
        reason = printable((str(error).splitlines() or [""])[0], 200)
        raise DataError(f"{path} is not a client's model ({type(error).__name__}: {reason})") from error
    return SavedModel(program, *facts, spec.inputs, tuple(outputs.shape[1:]), outputs.dtype)
