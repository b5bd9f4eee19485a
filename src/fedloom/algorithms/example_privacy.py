"""Differential privacy of examples in local training: which methods, models and settings can, and what they release."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.errors import ExperimentError
from fedloom.privacy.examples import ExamplePrivacy

if TYPE_CHECKING:
    from fedloom.algorithms.base import Algorithm

KEY = "federation.privacy.of"


@dataclass(frozen=True)
class NoisySteps:
    """Noisy steps of one visit of a client.

    Attributes
    ----------
    batch_size
        Expected, or fixed, number of examples of a batch; a client with fewer uses them all.
    count
        Batches.
    uses
        Noisy gradients of each batch.
    """

    batch_size: int
    count: int
    uses: int = 1


class ExampleReleases(NamedTuple):
    """Noisy sums over the examples of a client, as a privacy accountant counts them.

    Attributes
    ----------
    rate
        Share q of the examples in a batch: b/n, or 1 for a client with n ≤ b.
    noise_multiplier
        z, in units of the clipping norm.
    count
        Sums.
    """

    rate: float
    noise_multiplier: float
    count: int


def example_releases(
    method: Algorithm,
    settings: Any,
    privacy: ExamplePrivacy,
    examples: int,
    visits: int,
    personalizations: int = 0,
) -> tuple[ExampleReleases, ...]:
    """Return the noisy sums that a client with this many train examples has released.

    K gradients of one batch count as one sum with multiplier z/√K: Gaussian mechanisms on the same examples, adaptively
    chosen, disclose no more (J. Dong, A. Roth, W. J. Su, Gaussian differential privacy, arXiv 1905.02383, Corollary
    3.3), and the batch is drawn once.

    Parameters
    ----------
    visits, personalizations
        Training visits, and personalizations, of the client.
    """
    found = []
    for times, personalizing in ((visits, False), (personalizations, True)):
        for steps in method.noisy_steps(settings, examples, personalizing=personalizing) if times and examples else ():
            rate = min(steps.batch_size, examples) / examples
            z = privacy.noise_multiplier / math.sqrt(steps.uses)
            found.append(ExampleReleases(rate, z, steps.count * times))
    return tuple(release for release in found if release.count)


def check_example_privacy(method: Algorithm, settings: Any) -> None:
    """Check that a method with these settings protects examples; :meth:`FlatModel.check_steps` checks the model.

    Raises
    ------
    ExperimentError
        If it cannot; the message begins with the key to change.
    """
    why = method.example_privacy(settings) if _is_stated(method) else "It has not stated that it can."
    if why is not None:
        raise ExperimentError(
            f"algorithm.name: {method.name} cannot protect single examples ({KEY}: examples). {why}",
            hint="docs/algorithms/README.md lists the methods that can; with `of: clients`, others can",
            key="algorithm.name",
            found=method.name,
        )
    for key, found, text in _refused(method, settings):
        raise ExperimentError(f"{key}: {text} ({KEY}: examples)", key=key, found=found)


def _is_stated(method: Algorithm) -> bool:
    """Return True if no class of a method overrides what its clients do after one that states what they disclose."""
    classes = type(method).__mro__

    def at(name: str) -> int:
        return next((i for i, cls in enumerate(classes) if name in vars(cls)), len(classes))

    return at("example_privacy") <= min(at("train"), at("client"))


def _refused(method: Algorithm, settings: Any) -> Iterator[tuple[str, object, str]]:
    """Yield settings of noisy steps that have no meaning there, or use data, as key, value and what to do."""
    for name, local in settings:
        if name in method.at_home or not hasattr(local, "mask_absent"):
            continue
        if local.mask_absent:
            yield (
                f"algorithm.{name}.mask_absent",
                True,
                "the labels that a client lacks follow from its examples, without noise; set it to false",
            )
        for clip in ("clip", "clip_value"):
            if (value := getattr(local, clip, None)) is not None:
                yield (
                    f"algorithm.{name}.{clip}",
                    value,
                    f"gradients of examples are clipped by federation.privacy.clip, and clipping their noisy sum again "
                    f"would bias it; set it to null (got {value:g})",
                )
