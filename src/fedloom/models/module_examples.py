"""Gradients of single examples of a module, and layers whose output for one example depends on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedloom.core.draws import drawing_with
from fedloom.errors import ExperimentError
from fedloom.models.flat import Leaves
from fedloom.models.module_compare import near
from fedloom.models.module_inputs import ModuleInputs, mapped
from fedloom.models.module_layers import at_layer, hooks, named

SAME = 1e-4
"""Relative norm of a difference up to which two outputs of one example are the same."""


class _FirstExample(NamedTuple):
    """Output of each layer for the first example of a batch, in the order of the calls, and its loss."""

    outputs: list[tuple[str, nn.Module, Tensor]]
    loss: Tensor


class ExampleTrial(NamedTuple):
    """Training calls that show whether gradients of single examples can be computed for a module.

    Attributes
    ----------
    model
        Model in training mode that calls a module.
    leaves
        Parameters.
    x, others
        Trial inputs, and as many others.
    y
        Targets, used with both.
    """

    model: Any
    leaves: Leaves
    x: ModuleInputs
    others: ModuleInputs
    y: Tensor

    def check(self, *, stacked: bool) -> bool:
        """Check the calls; with ``stacked`` also for several clients together.

        Returns
        -------
        bool
            True if ``torch.func.vmap`` gives gradients of single examples, False if these need a call each.

        Raises
        ------
        ExperimentError
            If an example's output or loss depends on others, a call moves a buffer, or a step on one example fails. The
            message names the layer.
        """
        self._check_apart()
        if moving := self.model.layout.buffers:
            layer = moving[0].rpartition(".")[0]
            raise ExperimentError(
                f"{named(layer, self.model.called_module().get_submodule(layer))} changes its buffer {moving[0]} when "
                "called in training mode, and buffers are sent without noise (federation.privacy.of: examples). Make "
                "it a constant, or leave the layer out",
                key="model.factory",
            )
        with at_layer(self.model.called_module(), "for the gradient of one example", key="model.factory"):
            alone = [self._gradient_alone(i) for i in range(len(self.y))]
        try:
            found = [self._gradients(), *(self._gradients_of_two() if stacked else ())]
        except Exception:  # of a layer that vmap cannot run
            return False
        if self.model.draws:  # an example alone draws different numbers
            return True
        pairs = [(both[name][i], one) for both in found for i, own in enumerate(alone) for name, one in own.items()]
        return all(near(one, other, 1e-6) for one, other in pairs)

    # Outputs of one example in different batches

    def _check_apart(self) -> None:
        """Call the module twice, with the same first example beside different ones, and compare its outputs."""
        rest: ModuleInputs
        if isinstance(self.x, Tensor):
            assert isinstance(self.others, Tensor)
            rest = torch.cat([self.x[:1], self.others[1:]])
        else:
            assert isinstance(self.others, Mapping)
            rest = {name: torch.cat([t[:1], self.others[name][1:]]) for name, t in self.x.items()}
        first, second = self._called(self.x, self.y), self._called(rest, torch.cat([self.y[:1], self.y[1:].flip(0)]))
        for (name, layer, one), (_, _, other) in zip(first.outputs, second.outputs, strict=False):
            if one.shape != other.shape or not near(one, other, tolerance=SAME):
                raise ExperimentError(
                    f"{named(name, layer)} gives another output for an example in training mode if the other "
                    f"examples change{_APART}. Use GroupNorm or LayerNorm in place of batch normalization, and "
                    "treat each example separately",
                    key="model.factory",
                )
        if not near(first.loss, second.loss, tolerance=SAME):
            name = type(self.model.called_module()).__name__
            raise ExperimentError(
                f"model.factory: {name}.loss of an example depends on the other examples of the batch{_APART}. Compute "
                "the loss of each example from its own outputs",
                key="model.factory",
            )

    def _called(self, x: ModuleInputs, y: Tensor) -> _FirstExample:
        module: nn.Module = self.model.called_module()
        with torch.no_grad(), drawing_with(0), _first_rows(module, len(y)) as found:
            buffers = {name: b.clone() for name, b in self.leaves.buffers.items()}
            losses = self.model.loss(Leaves(self.leaves, buffers), x, y)
        return _FirstExample(found, losses[0].detach())

    # Gradients

    def _vmapped(self) -> Callable[..., dict[str, Tensor]]:
        """Return the function that gives the gradients of each example, ``[b, *shape]``."""

        def loss(w: dict[str, Tensor], x: ModuleInputs, y: Tensor) -> Tensor:
            total: Tensor = self.model.loss(Leaves(w), mapped(x, lambda t: t[None]), y[None]).sum()
            return total

        return vmap(grad(loss), in_dims=(None, 0, 0), randomness=self._randomness)

    @property
    def _randomness(self) -> str:
        return "different" if self.model.draws else "error"

    def _gradients(self) -> dict[str, Tensor]:
        with drawing_with(0):
            return self._vmapped()({name: leaf.detach() for name, leaf in self.leaves.items()}, self.x, self.y)

    def _gradients_of_two(self) -> list[dict[str, Tensor]]:
        """Return the gradients of each example of two clients with this model and these examples."""
        twice = {name: torch.stack([leaf.detach()] * 2) for name, leaf in self.leaves.items()}
        x, y = mapped(self.x, lambda t: torch.stack([t, t])), torch.stack([self.y, self.y])
        with drawing_with(0):
            found = vmap(self._vmapped(), randomness=self._randomness)(twice, x, y)
        return [{name: both[i] for name, both in found.items()} for i in range(2)]

    def _gradient_alone(self, i: int) -> dict[str, Tensor]:
        with torch.enable_grad(), drawing_with(0):
            loss = self.model.loss(self.leaves, mapped(self.x, lambda t: t[i : i + 1]), self.y[i : i + 1]).sum()
            found = torch.autograd.grad(loss, list(self.leaves.values()), materialize_grads=True)
        return dict(zip(self.leaves, found, strict=True))


_APART = ", so that no example's part of a gradient can be clipped (federation.privacy.of: examples)"


@contextmanager
def _first_rows(module: nn.Module, rows: int) -> Iterator[list[tuple[str, nn.Module, Tensor]]]:
    """Note the first row of each layer's output that has one row per example."""
    found: list[tuple[str, nn.Module, Tensor]] = []

    def note(name: str, layer: nn.Module, output: object) -> None:
        if isinstance(output, Tensor) and output.dim() and len(output) == rows:
            found.append((name, layer, output[0].detach().clone()))

    with hooks(module, note):
        yield found
