"""Detection of random numbers that a PyTorch module draws, by the state of the generators."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fedloom.errors import ExperimentError
from fedloom.models.module_layers import hooks, named


@contextmanager
def no_draws(module: nn.Module, mode: str, known: NumpyGenerators, *, watch: bool = False) -> Iterator[None]:
    """Reject a module that uses random generators, however rarely that matters, and restore the generators.

    ``watch`` also detects generators other than the global ones; some layers then use another kernel.
    """
    given, numpy = _GivenGenerators(), known.present()
    before = _generators(numpy) | {given.name: given.used}
    drew: list[tuple[str, nn.Module]] = []  # the innermost first, since it returns first
    untouched: list[bool] = []

    def used() -> list[str]:
        now = _generators(numpy) | {given.name: given.used}
        return [name for name, state in now.items() if state != before[name]]

    def leave(name: str, layer: nn.Module) -> None:
        if untouched.pop() and used():
            drew.append((name, layer))

    with hooks(module, leave, lambda name, layer: untouched.append(not used())):
        try:
            with given if watch else nullcontext():
                yield
        finally:
            found = used()
            random.setstate(before["Python"])
            np.random.set_state(before["numpy"])  # noqa: NPY002  # modules may use it
            torch.default_generator.set_state(torch.frombuffer(bytearray(before["torch"]), dtype=torch.uint8))
            for generator, state in zip(numpy, before["a generator of numpy"], strict=True):
                generator.bit_generator.state = state
    if found:
        raise ExperimentError(
            f"{named(*(drew or [('', module)])[0])} would give different outputs in another run, because it draws "
            f"random numbers {mode} (by {found[0]}). Remove it, or set its probability to 0"
        )


class NumpyGenerators:
    """Generators of numpy in this process, such as one in a global name of a module's file.

    Looking through all objects takes a tenth of a second. While nothing is collected (:func:`collection_paused`), new
    objects stay in the youngest generation, and only that is looked through again.
    """

    def __init__(self) -> None:
        self._known: dict[int, np.random.Generator] = {}
        self._collections: list[int] | None = None

    def present(self) -> list[np.random.Generator]:
        """Return those that there are now."""
        collections = [generation["collections"] for generation in gc.get_stats()]
        objects = gc.get_objects(generation=0 if collections == self._collections else None)
        self._collections = collections
        self._known |= {id(value): value for value in objects if type(value) is np.random.Generator}
        return [*self._known.values()]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage within the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _generators(numpy: Sequence[np.random.Generator]) -> dict[str, Any]:
    """Return the states of the process's global generators, and of numpy's others."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": (name, tuple(np.asarray(keys).tolist()), *rest),
        "Python": random.getstate(),
        "a generator of numpy": [_plain(generator.bit_generator.state) for generator in numpy],
    }


def _plain(state: Any) -> Any:
    """Return a state with lists in place of arrays, so that two states can be compared."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


class _GivenGenerators(TorchFunctionMode):
    """Mode that records whether torch functions receive a generator of their own."""

    name = "a separate generator"

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.used = self.used or (kwargs or {}).get("generator") is not None
        return func(*args, **(kwargs or {}))
