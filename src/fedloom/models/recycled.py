"""Reuse of the memory of large results: obtaining new memory takes a third of the time that filling it does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

KEPT_BYTES = 64 << 20
"""Maximum size of the memory that is kept while unused."""


class RecycledMemory:
    """Memory of one float32 result at a time, reused once no tensor refers to it."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # at most one

    def empty(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialized tensor ``[rows, columns]``, whose memory nothing else uses."""
        size = rows * columns
        if 4 * size > KEPT_BYTES or not size:
            return torch.empty(rows, columns)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(0)
        if len(memory) < size:
            memory = torch.empty(size)
        view = memoryview(cast("Buffer", memory.numpy()))
        # The storage of the result holds the view, and so do all tensors and arrays that share it.
        weakref.finalize(view, self._recycle, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.float32, count=size).view(rows, columns)

    def _recycle(self, memory: Tensor) -> None:
        if len(memory) > max((len(kept) for kept in self._free), default=0):  # another thread may take it meanwhile
            self._free[:] = [memory]
