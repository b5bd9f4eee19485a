"""Memory format in which the convolutions of a module are fast on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

_MOST = 32
"""Kernel entries for each output of the convolutions of one example, up to which channels-last kernels are faster.

Every call reorders channels-last kernels, which outweighs the gain where kernels are large and images small: a ResNet18
with 7x7 kernels at its entry has 200 for images of 32x32 (1.2 times the time) and 50 for 64x64 (as fast), and a
VGG of 4 blocks has 13 (0.8 times the time). See docs/models.md.
"""


class ConvolutionSizes:
    """Sizes of the kernels and of the outputs of a module's convolutions in a call with trial inputs.

    Unlike times, they depend only on the module and the shape of its inputs, so all processes of a run choose the same
    memory format, and get the same bits.
    """

    def __init__(self) -> None:
        self._kernels = self._outputs = 0
        self._by_instance = False

    @contextmanager
    def noted(self, module: nn.Module) -> Iterator[None]:
        """Note the sizes of all convolutions that are called within the block."""
        self._by_instance = any(isinstance(layer, _InstanceNorm) for layer in module.modules())
        convolutions = [layer for layer in module.modules() if isinstance(layer, _ConvNd)]
        registered = [layer.register_forward_hook(self._note) for layer in convolutions]
        try:
            yield
        finally:
            for hook in registered:
                hook.remove()

    def _note(self, layer: Any, given: Any, outputs: Any) -> None:
        del given
        if isinstance(outputs, Tensor) and layer.weight.dim() == 4:
            self._kernels += layer.weight.numel()
            self._outputs += outputs.numel() // max(len(outputs), 1)

    @property
    def gains_from_channels_last(self) -> bool:
        """True if channels-last kernels are faster; instance normalization would change the format back each time."""
        return not self._by_instance and self._kernels <= _MOST * self._outputs
