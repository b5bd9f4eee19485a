"""Draws by code that uses global random generators, made repeatable."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_LOCK = threading.RLock()
"""Held while global generators are replaced, since all threads share them."""


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let the global generators of torch, numpy and Python draw from a seed that a generator gives.

    Their states are restored afterwards, so that the block changes no other draws. The generator advances by one draw.
    """
    seed = int(torch.randint(2**62, (1,), generator=generator))
    with _LOCK, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # modules may use it
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
