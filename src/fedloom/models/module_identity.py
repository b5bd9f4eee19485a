"""Identity of a module, the key under which a process keeps its findings about it."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

_HEAP_TYPE = 1 << 9
"""Flag of classes that are written in Python."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _UnknownContent(Exception):
    """Value whose content cannot be read from outside, such as a generator or an open file."""


class _Walk:
    """Traversal of all parts of an object in a fixed order.

    Classes and functions are kept as objects, because a Python module that is reloaded has others of the same names.
    """

    def __init__(self) -> None:
        self.digest = hashlib.blake2b()
        self.code: list[Hashable] = []
        self._met: dict[int, int] = {}
        self._alive: list[object] = []  # kept alive, so that no two values share an id

    def add(self, value: Any) -> None:
        """Add a value and all of its parts; a value met before is added as a reference.

        Raises
        ------
        _UnknownContent
            If the content of a part cannot be read.
        """
        if isinstance(value, (*_PLAIN, *_OF_TORCH)):
            self._note(f"{type(value).__name__} {value!r}")
        elif isinstance(value, FunctionType) and "<" in value.__qualname__:  # its enclosed variables may change
            self._none(value)
        elif isinstance(value, type | FunctionType | BuiltinFunctionType | ModuleType):
            self._note("code")
            self.code.append(value)
        elif id(value) in self._met:
            self._note(f"again {self._met[id(value)]}")
        else:
            self._met[id(value)] = len(self._met)
            self._alive.append(value)
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        self.add(type(value))
        if isinstance(value, Tensor):
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            self._note(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.requires_grad}")
            self.digest.update(content.tobytes())
        elif isinstance(value, np.ndarray):
            self._note(f"{value.dtype} {value.shape}")
            self.digest.update(value.tobytes() if value.dtype.kind != "O" else self._none(value))
        elif isinstance(value, BaseModel):
            self.add(value.model_dump())
        elif isinstance(value, MethodType):
            self._add_all(value.__func__, value.__self__)
        elif isinstance(value, dict):
            self._add_all(*(part for item in value.items() for part in item))
        elif isinstance(value, list | tuple):
            self._add_all(*value)
        elif isinstance(value, set | frozenset):
            self._note(repr(sorted(map(repr, value))))
        elif isinstance(value, nn.Module) or all(_is_of_python(each) for each in type(value).__mro__):
            self.add(vars(value))
        else:
            self._none(value)

    def _add_all(self, *values: Any) -> None:
        self._note(str(len(values)))
        for value in values:
            self.add(value)

    def _note(self, text: str) -> None:
        self.digest.update(f"{len(text)}:{text}".encode())

    @staticmethod
    def _none(value: Any) -> bytes:
        raise _UnknownContent(type(value).__name__)


def _is_of_python(cls: type) -> bool:
    """Return True if instances keep all of their state in ``__dict__``."""
    return cls is object or bool(cls.__flags__ & _HEAP_TYPE and not cls.__dict__.get("__slots__"))


def identity_of(module: nn.Module, *others: object) -> Hashable | None:
    """Return a key that is equal for modules of the same code with equal tensors and attributes, and equal ``others``.

    It is None if the content of an attribute cannot be read, such as that of a generator.
    """
    walk = _Walk()
    try:
        walk.add((module, *others))
    except Exception:  # code of the module may raise anything; the module is then checked again each time
        return None
    return walk.digest.digest(), tuple(walk.code)
