"""Check that a module does not derive category codes from features, which are standardized before use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedloom.errors import ExperimentError
from fedloom.models.module_call import call_of
from fedloom.models.module_inputs import InputDescription, InputShape, descriptions, trial_inputs
from fedloom.models.module_layers import hooks, named

PROBES = (5.0, 6.0, 7.0)
"""Extreme standardized features, at which truncated codes differ from each other, but indices of buckets are equal."""

LOOKUPS = frozenset(
    {"__getitem__", "embedding", "embedding_bag", "gather", "index_select", "one_hot", "take", "take_along_dim"}
)
"""Functions of torch that look values up by integers."""


def check_codes(make: Callable[[], nn.Module], input_shape: InputShape, kind: str = "features") -> None:
    """Reject a module that looks up values by codes that it truncates from features.

    Parameters
    ----------
    make
        Factory of the module.
    input_shape
        Shape of the input, or the descriptions of named inputs.
    kind
        Kind of a single input.

    Raises
    ------
    ExperimentError
        If there is such a lookup; the error names the layer.
    """
    described = descriptions(input_shape, kind, outputs=2)
    if not any(each.kind == "features" for each in described.values()):
        return
    with torch.random.fork_rng(devices=[]):
        module = make().eval()
        seen = [_lookups(module, described, value) for value in PROBES]
    for (where, first), *others in zip(*seen, strict=False):
        if any(not torch.equal(first, other) for _, other in others):
            raise ExperimentError(
                f"{named(where, module.get_submodule(where))} looks up codes that it truncates from the features, but "
                "features are standardized as measurements, so the codes would differ from those in the data",
                hint="pack the codes as integers, or give the network a column of 0 and 1 for each category",
            )


def _lookups(module: nn.Module, described: Mapping[str, InputDescription], value: float) -> list[tuple[str, Tensor]]:
    """Return the layer and the integers of each lookup, for features that consist of one value."""
    x = trial_inputs(described, 0, rows=2)
    if isinstance(x, Tensor):
        x = torch.full_like(x, value)
    else:
        x = {name: torch.full_like(t, value) if described[name].kind == "features" else t for name, t in x.items()}
    layers: list[str] = []
    mode = _Lookups(layers)
    inside = hooks(module, lambda name, *_: layers.remove(name), lambda name, layer: layers.append(name))
    with inside, mode, torch.no_grad(), suppress(Exception):  # expected: integers out of range
        call_of(module, x).result(module, x)
    return mode.found


class _Lookups(TorchFunctionMode):
    """Mode that records the integers with which functions of torch look values up.

    Parameters
    ----------
    layers
        Names of the layers that are being called, the innermost last.
    """

    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self.found: list[tuple[str, Tensor]] = []
        self._layers = layers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in LOOKUPS:
            where = self._layers[-1] if self._layers else ""
            self.found += [(where, integers.clone()) for integers in _integers((args, kwargs or {}))]
        return func(*args, **(kwargs or {}))


def _integers(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool:
            yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)
