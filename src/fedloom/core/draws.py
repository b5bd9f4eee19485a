"""Draws by code that uses global random generators, made repeatable."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

_LOCK = threading.RLock()
"""Held while global generators are replaced, since all threads share them."""


def seed_from(generator: torch.Generator) -> int:
    """Draw a seed for :func:`drawing_with`; the generator advances by one draw."""
    return int(torch.randint(2**62, (), generator=generator))


def drawing_from(generator: torch.Generator) -> AbstractContextManager[None]:
    """Return :func:`drawing_with` for a seed that a generator draws; the generator advances by one draw."""
    return drawing_with(seed_from(generator))


@contextmanager
def drawing_with(seed: int, *, torch_alone: bool = False) -> Iterator[None]:
    """Let the global generators of torch, numpy and Python draw from a seed, and restore their states afterwards.

    Parameters
    ----------
    torch_alone
        Leave numpy's and Python's generators unchanged, for code that does not use them: this takes 5 µs, not 80.
    """
    with _LOCK:
        of_torch = [(generator, generator.get_state()) for generator in _generators_of_torch()]
        of_others = None if torch_alone else (random.getstate(), np.random.get_state(legacy=False))  # noqa: NPY002
        try:
            for generator, _ in of_torch:
                generator.manual_seed(seed)
            if of_others is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)  # noqa: NPY002  # modules may use it
            yield
        finally:
            for generator, state in of_torch:
                generator.set_state(state)
            if of_others is not None:
                random.setstate(of_others[0])
                np.random.set_state(of_others[1])  # noqa: NPY002


def _generators_of_torch() -> tuple[torch.Generator, ...]:
    """Return torch's global generators: that of the CPU, and one for each GPU if this process uses GPUs."""
    return (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()))  # type: ignore[no-untyped-call]
