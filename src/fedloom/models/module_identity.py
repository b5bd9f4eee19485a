"""Identity of a module, by which what a process found out about it is remembered."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn


class _Pickler(pickle.Pickler):
    """Pickler that replaces each tensor by a digest, and collects the classes and functions that an object refers to.

    These are pickled by name alone, and a module of Python that is loaded again has others of the same names.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.code: list[Hashable] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType):
            self.code.append(value)
        if not isinstance(value, Tensor):
            return NotImplemented
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        about = type(value).__name__, value.dtype, tuple(value.shape), value.stride(), value.requires_grad
        return str, (f"{about} {hashlib.blake2b(content.data).hexdigest()}",)


def identity_of(module: nn.Module, *others: object) -> Hashable | None:
    """Return a key that is equal for modules of the same code with equal tensors and attributes, and equal ``others``.

    None if an attribute cannot be pickled, such as a lambda.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump((module, *others))
    except Exception:  # whatever code of the module's raises; it is then checked again each time
        return None
    return hashlib.blake2b(file.getvalue()).digest(), tuple(pickler.code)
