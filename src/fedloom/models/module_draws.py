"""Detection of random numbers that a PyTorch module draws, by the state of the generators."""

from __future__ import annotations

import gc
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedloom.errors import ExperimentError
from fedloom.models.module_layers import hooks, named

GLOBAL = ("torch", "numpy", "python")
"""Libraries whose global generators a run seeds."""


@contextmanager
def draws_noted(
    module: nn.Module, generators: NumpyGenerators, notes: set[str] | None, *, watch: bool = False
) -> Iterator[None]:
    """Record the libraries whose global generators a module draws from, and restore the generators.

    Raise ExperimentError if the module draws from a generator of its own, or, if ``notes`` is None, from any generator;
    the message names the layer.

    Parameters
    ----------
    notes
        Set that receives them; None to reject draws.
    watch
        True to detect other generators, too; some layers then use another kernel.
    """
    passed, numpy = _GivenGenerators(), generators.present()
    states_before = _generators(numpy) | {passed.name: passed.used}
    drew: dict[str, tuple[str, nn.Module]] = {}  # by generator, the innermost layer first, since it returns first
    active: list[list[str]] = []  # generators used before each active layer

    def used() -> list[str]:
        now = _generators(numpy) | {passed.name: passed.used}
        return [name for name, state in now.items() if state != states_before[name]]

    def leave(name: str, layer: nn.Module, output: Any) -> None:
        earlier = active.pop()
        for source in used():
            if source not in earlier:
                drew.setdefault(source, (name, layer))

    with hooks(module, leave, lambda name, layer: active.append(used())):
        try:
            with passed if watch else nullcontext():
                yield
        finally:
            sources = used()
            random.setstate(states_before["python"])
            np.random.set_state(states_before["numpy"])  # noqa: NPY002  # modules may use it
            torch.default_generator.set_state(torch.frombuffer(bytearray(states_before["torch"]), dtype=torch.uint8))
            for generator, state in zip(numpy, states_before["a generator of numpy"], strict=True):
                generator.bit_generator.state = state
    for source in sources:
        location = named(*drew.get(source, ("", module)))
        if source not in GLOBAL:
            raise ExperimentError(
                f"{location} draws random numbers from {source} of its own, which a run cannot seed. Draw from the "
                "global generator of torch, numpy or Python: leave out `generator=`, or use torch.rand"
            )
        if notes is None:
            raise ExperimentError(
                f"{location} draws random numbers in evaluation mode (by {source}), so that predictions could not be "
                "repeated. Draw in training mode only: `if self.training`, or F.dropout(x, p, self.training)"
            )
        notes.add(source)


class NumpyGenerators:
    """Generators of numpy in this process, such as one in a global name of a module's file.

    Scanning all objects takes some hundredths of a second. While garbage collection is paused, new objects stay in the
    youngest generation, so that only this generation is scanned again.
    """

    def __init__(self) -> None:
        self._known: dict[int, np.random.Generator] = {}
        self._collections: list[int] | None = None

    def present(self) -> list[np.random.Generator]:
        """Return the generators that exist now."""
        collections = [generation["collections"] for generation in gc.get_stats()]
        objects = gc.get_objects(generation=0 if collections == self._collections else None)
        self._collections = collections
        of_numpy = map(operator.is_, map(type, objects), repeat(np.random.Generator))
        self._known |= {id(value): value for value in compress(objects, of_numpy)}
        return [*self._known.values()]


def _generators(numpy: Sequence[np.random.Generator]) -> dict[str, Any]:
    """Return the states of the process's global generators, and of numpy's others."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": (name, tuple(np.asarray(keys).tolist()), *rest),
        "python": random.getstate(),
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


TOLERANCE = 1e-2
"""Relative tolerance between results of different kernels or different numbers of rows."""

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of a module that torch manages."""

_NESTED = 4
"""Nesting of lists and dicts up to which attributes are compared."""

ROUNDING = 1e-6
"""Norm, relative to the whole gradient's, up to which a difference in one part counts as a rounding error."""


def near(a: Tensor, b: Tensor, least: float = 1e-9, tolerance: float = TOLERANCE) -> bool:
    """Return True if the norm of the difference is at most ``tolerance`` times that of b, or at most ``least``."""
    a, b = (t.detach().double().nan_to_num(posinf=0.0, neginf=0.0) for t in (a, b))
    return bool((a - b).norm() <= tolerance * b.norm() + least)


def attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return comparable values of the attributes of all layers, by layer and key."""
    return {
        (name, key): _comparable(value, _NESTED)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in _INTERNAL
    }


def _comparable(value: Any, levels: int) -> Any:
    """Return a value that is equal for equal contents only; None for types that cannot be compared."""
    match value:
        case Tensor():
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return str(value.dtype), tuple(value.shape), content.numpy().tobytes()
        case nn.Module():  # hidden from the module that holds it, in a list
            return {name: _comparable(t, 0) for name, t in (*value.named_parameters(), *value.named_buffers())}
        case np.ndarray():
            return str(value.dtype), value.shape, value.tobytes()
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case np.random.Generator():
            return str(value.bit_generator.state)
        case random.Random():
            return value.getstate()
        case set() | frozenset():
            return sorted(map(repr, value))
        case int() | float() | str() | bytes():
            return repr(value)
    return _comparable_items(value, levels - 1) if levels else None


def _comparable_items(value: Any, levels: int) -> Any:
    if isinstance(value, dict):
        return {str(key): _comparable(each, levels) for key, each in value.items()}
    return [_comparable(each, levels) for each in value] if isinstance(value, list | tuple) else None
