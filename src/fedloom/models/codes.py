"""Check that no embedding looks up category codes cut from features, which are standardized before use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from fedloom.errors import ExperimentError

PROBES = (5.0, 6.0, 7.0)
"""Far-out standardized features at which codes cut from them differ and codes from buckets do not."""


def check_codes(make: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> None:
    """Reject a module whose embeddings look up codes cut from features.

    Parameters
    ----------
    make
        Factory of the module.
    input_shape
        Shape of one input.

    Raises
    ------
    ExperimentError
        If there is such an embedding; the error names the layer.
    """
    with torch.random.fork_rng(devices=[]):
        found = _cut_from_features(make(), input_shape)
    if found is not None:
        raise ExperimentError(
            f"model.factory: layer {found!r} looks up codes that are cut from the features, and features are "
            "standardized as measurements: it would get other codes than the data have",
            hint="give the network a column of 0 and 1 for each category, and multiply them by a linear layer",
        )


def _cut_from_features(module: nn.Module, input_shape: tuple[int, ...]) -> str | None:
    """Return the name of an embedding whose indices depend on the inputs; None if there is none."""
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    }
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}

    def noted(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: seen[name].append(given[0].detach().clone())

    for name, layer in layers.items():
        layer.register_forward_pre_hook(noted(name))
    for value in PROBES if layers else ():
        with torch.no_grad(), suppress(Exception):  # expected: indices out of range
            module(torch.full((2, *input_shape), value))
    return next((name for name, x in seen.items() if any(not torch.equal(x[0], other) for other in x)), None)
