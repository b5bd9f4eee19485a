"""Claims of differential privacy: of a message, and of examples in local training, with the settings that allow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedloom.errors import ExperimentError

if TYPE_CHECKING:
    from fedloom.algorithms.base import Algorithm

KEY = "federation.privacy.of"


@dataclass(frozen=True)
class Privacy:
    """Guarantee of the Gaussian mechanism for one message of a client (``fedloom.privacy``).

    Attributes
    ----------
    covers
        Names of the covered message classes; a client's other messages are not protected.
    clip
        C: largest ℓ2 norm of one example's term in a sum over n examples, which the client sends divided by n.
    noise_multiplier
        z: noise of standard deviation z·2C/n on each coordinate, 2C/n being the effect of replacing one example.
    delta
        δ of the reported (ε, δ).
    """

    covers: tuple[str, ...]
    clip: float
    noise_multiplier: float
    delta: float


@dataclass(frozen=True)
class NoisySteps:
    """Noisy steps of one visit of a client, as a privacy accountant counts them.

    A batch is drawn anew for each step: every example with probability q = b/n, or b of n (``federation.privacy``);
    q = 1 for a client with n ≤ b. K noisy sums over one batch disclose no more than one with noise multiplier z/√K: as
    Gaussian mechanisms on the same examples, adaptively chosen, they compose to that (J. Dong, A. Roth, W. J. Su,
    Gaussian differential privacy, arXiv 1905.02383, Corollary 3.3), and the batch is drawn once.

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


def check_example_privacy(method: Algorithm, settings: Any) -> None:
    """Check that a method with these settings protects examples; :meth:`FlatModel.check_steps` checks the model.

    Raises
    ------
    ExperimentError
        If it cannot; the message begins with the key to change.
    """
    why = method.example_privacy(settings) if _is_stated(method) else "The method does not state that it can."
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
    """Return True if the class that states what clients disclose also defines, or inherits, all that they do."""
    classes = type(method).__mro__

    def first_with(*names: str) -> int:
        return next((i for i, cls in enumerate(classes) if not vars(cls).keys().isdisjoint(names)), len(classes))

    return first_with("example_privacy", "no_example_privacy") <= first_with("train", "client")


def _refused(method: Algorithm, settings: Any) -> Iterator[tuple[str, object, str]]:
    """Yield settings that noisy steps do not permit, as key, value and advice."""
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
