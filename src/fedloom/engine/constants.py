"""Comparison of the tensors that every process creates itself, because no run stores or sends them.

These are a model's frozen parameters and its buffers that do not move, compared by digests; and, for methods that start
from it (:meth:`fedloom.algorithms.base.Algorithm.starts_alike`), the model's initialization θ₀. Drawn numbers differ in
their last digits between kinds of processors, so θ₀ is compared by figures, within a tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedloom.engine.assemble import RunContext
from fedloom.errors import DataError
from fedloom.models.module_layers import digests_of
from fedloom.runs.files import CONSTANTS, RunFiles

START = "initialization"
"""Key of the figures of θ₀ in the mapping of digests."""

PARTS, TOLERANCE = 8, 1e-3
"""Number of sums of θ₀, and the allowed difference of a figure, as a fraction of the root mean square."""


def digests_of_run(parts: RunContext) -> dict[str, str]:
    """Return the digests of the model's constants by name, and the figures of θ₀ if the method starts from it."""
    digests = digests_of(parts.setup.model.constants)
    if parts.algorithm.starts_alike(parts.settings):
        digests[START] = figures_of(parts.setup.model.init(torch.Generator().manual_seed(0), parts.setup.dtype))
    return digests


def figures_of(theta: torch.Tensor) -> str:
    """Return the root mean square of θ ``[d]``, and sums of parts of it under random signs, scaled to that size."""
    signs = (
        torch.randint(0, 2, theta.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8).mul_(2).sub_(1)
    )
    signed_theta = torch.nn.functional.pad(theta.double() * signs, (0, -len(theta) % PARTS))
    figures = torch.cat([signed_theta.norm()[None], signed_theta.reshape(-1, PARTS).sum(0)]) / max(len(theta), 1) ** 0.5
    return " ".join(f"{figure:.6g}" for figure in figures.tolist())


def are_close(own: str, other: str) -> bool:
    """Return True if two figures of θ₀ agree within the tolerance, a fraction of the root mean square."""
    try:
        ours, theirs = ([float(figure) for figure in text.split()] for text in (own, other))
    except ValueError:
        return False
    allowed = TOLERANCE * max(abs(ours[0]), 1e-12)
    return len(ours) == len(theirs) and all(abs(a - b) <= allowed for a, b in zip(ours, theirs, strict=True))


def write_constants(folder: RunFiles, parts: RunContext) -> None:
    """Write the digests of the run's constants to its folder, if there are any."""
    if digests := digests_of_run(parts):
        folder.write_json(CONSTANTS, {"tensors": digests})


def check_run_constants(folder: RunFiles, parts: RunContext) -> None:
    """Raise DataError unless the constants are those of a run; a run without the file has recorded none."""
    if folder.has(CONSTANTS):
        check_constants(parts, folder.json(CONSTANTS)["tensors"], f"the run {folder.path}")


def check_constants(parts: RunContext, expected: Mapping[str, str], owner: str) -> None:
    """Raise DataError, with the name of the first that differs, unless the constants have these digests."""
    digests_found = digests_of_run(parts)
    for name in (*expected, *digests_found):
        own, other = digests_found.get(name), expected.get(name)
        if own == other or (name == START and own and other and are_close(own, other)):
            continue
        if name == START:
            raise DataError(
                f"model.factory: the model's initialization is not that of {owner}. {parts.algorithm.name} starts from "
                "it and never sends it, so it must be the same in every process",
                key="model.factory",
                hint="use the same factory with the same pretrained weights everywhere",
            )
        difference = (
            f"has digest {own} here and {other} in {owner}"
            if own and other
            else f"exists only {'here' if own else f'in {owner}'}"
        )
        raise DataError(
            f"model.factory: the constant tensor {name!r} {difference}. Frozen parameters and fixed buffers are never "
            "sent, so they must be the same in every process",
            key="model.factory",
            hint="use the same factory with the same pretrained weights everywhere",
        )
