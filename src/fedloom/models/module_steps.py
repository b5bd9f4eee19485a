"""Training steps of a module beyond the first check: of several clients, with second derivatives, on a device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedloom.core.draws import drawing_with
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel, Leaves, vmapped_gradients
from fedloom.models.module_call import ModuleInputs
from fedloom.models.module_check import TrialData
from fedloom.models.module_draws import near
from fedloom.models.module_layers import at_layer, hooks, named

CPU = torch.device("cpu")

KEY_STACKED = "runtime.clients_at_once"

SAME = 1e-4
"""Relative norm of a difference up to which two outputs of one example are the same."""

_APART = ", so that no example's part of a gradient can be clipped (federation.privacy.of: examples)"


class Steps(NamedTuple):
    """Training steps of a run: the arguments of :meth:`FlatModel.check_steps`."""

    clients: int = 1
    twice: bool = False
    device: torch.device = CPU
    examples: bool = False


def check_steps(model: FlatModel, data: TrialData, steps: Steps) -> None:
    """Make training steps with a model that calls a module, and reject those that fail.

    Raise ExperimentError if a step fails, with its layer and the key to change; if clients get different results
    together than alone; or, where gradients of single examples are needed, if an example's output or loss depends on
    others, or a call moves a buffer.

    Parameters
    ----------
    data
        Trial inputs and targets.
    """
    if steps != Steps() or model.in_bfloat16:
        _Trial(model, data, steps).check()


class _Trial:
    """Model, and two clients on which it is tried."""

    def __init__(self, model: Any, data: TrialData, steps: Steps) -> None:
        self.model, self.training, self.steps = model, model.in_training(), steps
        generator = torch.Generator().manual_seed(0)
        theta = model.init(generator)
        scale = 0.5 + torch.rand(len(theta), generator=generator)  # keeps variances positive
        self.thetas = [theta.to(steps.device), (theta * scale).to(steps.device)]
        self.inputs = [tree_map(lambda t: t.to(steps.device), x) for x in (data.x, data.others)]
        self.y = data.y.to(steps.device)
        self.randomness = "different" if self.training.draws else "error"

    def check(self) -> None:
        """Make the steps."""
        if self.steps.examples:
            self._check_apart()
            self.model.take_examples(vmapped=self._vmaps_examples())
        alone = [self._step(i) for i in range(2)]
        if self.steps.clients == 1:
            return
        together, predictions = self._steps_together(), self._predicted_together()
        pairs = [("its outputs differ", predictions[i], self._predicted(i)) for i in range(2)]
        if not self.training.draws:  # together they draw different numbers
            for name, both in together.items():
                pairs += [(f"the gradient of {name} differs", both[i], alone[i][name]) for i in range(2)]
        for subject, several, one in pairs:
            if not near(several, one):
                raise ExperimentError(
                    f"{KEY_STACKED}: {subject} when several clients are trained together; set it to 1",
                    key=KEY_STACKED,
                    found=self.steps.clients,
                    allowed=[1],
                )

    # One client

    def _leaves(self, i: int) -> Leaves:
        layout = self.model.layout
        return layout.divided(layout.leaves(self.thetas[i], requires_grad=True))  # type: ignore[no-any-return]

    def _step(self, i: int) -> dict[str, Tensor]:
        """Make a step of one client and a prediction, and return the gradient."""
        hint, key = ("; set model.precision to float32", "model.precision") if self.model.in_bfloat16 else ("", None)
        place = "" if self.steps.device == CPU else f" on {self.steps.device.type}"
        with at_layer(self.training.called_module(), f"in a training step{place}", hint=hint, key=key):
            gradients = self._gradients(self._leaves(i), self.inputs[i], self.y)
        with at_layer(self.model.called_module(), f"in a prediction{place}", hint=hint, key=key):
            self._predicted(i)
        if self.steps.twice:
            hint = "; choose a first-order variant of the method, or layers with second derivatives"
            with at_layer(self.training.called_module(), "when its gradient is differentiated", hint=hint):
                self._gradients(self._leaves(i), self.inputs[i], self.y, twice=True)
        return gradients

    def _gradients(self, leaves: Leaves, x: Any, y: Tensor, *, twice: bool = False) -> dict[str, Tensor]:
        with torch.enable_grad(), drawing_with(0):
            return _differentiated(self.training.loss(leaves, x, y).mean(), leaves, twice=twice)

    @torch.no_grad()
    def _predicted(self, i: int) -> Tensor:
        outputs: Tensor = self.model.forward(self._leaves(i), self.inputs[i])
        return outputs

    # Two clients together, as the trainer stacks them

    def _both(self) -> tuple[Leaves, ModuleInputs]:
        one, other = (self._leaves(i) for i in range(2))
        stacked = {name: torch.stack([leaf.detach(), other[name].detach()]) for name, leaf in one.items()}
        buffers = {name: torch.stack([buffer, other.buffers[name]]) for name, buffer in one.buffers.items()}
        leaves = Leaves({name: leaf.requires_grad_() for name, leaf in stacked.items()}, buffers)
        return leaves, tree_map(lambda *t: torch.stack(t), *self.inputs)

    def _at_layer(self, model: Any) -> AbstractContextManager[None]:
        hint = f"; set {KEY_STACKED} to 1"
        return at_layer(model.called_module(), "for several clients together", hint=hint, key=KEY_STACKED)

    @torch.no_grad()
    def _predicted_together(self) -> Tensor:
        leaves, x = self._both()
        with self._at_layer(self.model):
            together = vmap(lambda w, b, x: self.model.forward(Leaves(w, b), x))
            outputs: Tensor = together(dict(leaves), leaves.buffers, x)
        return outputs

    def _steps_together(self) -> dict[str, Tensor]:
        (leaves, x), y = self._both(), torch.stack([self.y, self.y])
        losses = vmap(lambda w, b, x, y: self.training.loss(Leaves(w, b), x, y).mean(), randomness=self.randomness)
        gradients: dict[str, Tensor] = {}
        with torch.enable_grad(), drawing_with(0), self._at_layer(self.training):
            for twice in (True, False) if self.steps.twice else (False,):
                buffers = {name: b.clone() for name, b in leaves.buffers.items()}
                gradients = _differentiated(losses(dict(leaves), buffers, x, y).sum(), leaves, twice=twice)
        return gradients

    # Single examples

    def _check_apart(self) -> None:
        """Call the module twice, with the same first example beside different ones, and compare its outputs."""
        module: nn.Module = self.training.called_module()
        rest = tree_map(lambda x, other: torch.cat([x[:1], other[1:]]), *self.inputs)
        outputs, loss = self._of_first(module, self.inputs[0], self.y)
        others, other_loss = self._of_first(module, rest, torch.cat([self.y[:1], self.y[1:].flip(0)]))
        for (name, layer, one), (_, _, other) in zip(outputs, others, strict=False):
            if one.shape != other.shape or not near(one, other, tolerance=SAME):
                raise ExperimentError(
                    f"{named(name, layer)} gives another output for an example in training mode if the other "
                    f"examples change{_APART}. Use GroupNorm or LayerNorm in place of batch normalization, and "
                    "treat each example separately",
                    key="model.factory",
                )
        if not near(loss, other_loss, tolerance=SAME):
            raise ExperimentError(
                f"model.factory: {type(module).__name__}.loss of an example depends on the other examples of the batch"
                f"{_APART}. Compute the loss of each example from its own outputs",
                key="model.factory",
            )
        if buffers := self.training.layout.buffers:
            layer = buffers[0].rpartition(".")[0]
            raise ExperimentError(
                f"{named(layer, module.get_submodule(layer))} changes its buffer {buffers[0]} when called in training "
                "mode, and buffers are sent without noise (federation.privacy.of: examples). Make it a constant, or "
                "leave the layer out",
                key="model.factory",
            )

    def _of_first(self, module: nn.Module, x: Any, y: Tensor) -> tuple[list[tuple[str, nn.Module, Tensor]], Tensor]:
        """Return each layer's output for the first example of a batch, in the order of the calls, and its loss."""
        outputs: list[tuple[str, nn.Module, Tensor]] = []

        def note(name: str, layer: nn.Module, output: object) -> None:
            if isinstance(output, Tensor) and output.dim() and len(output) == len(y):
                outputs.append((name, layer, output[0].detach().clone()))

        with torch.no_grad(), drawing_with(0), hooks(module, note):
            return outputs, self.training.loss(self._leaves(0), x, y)[0].detach()

    def _vmaps_examples(self) -> bool:
        """Return True if ``torch.func.vmap`` gives gradients of single examples, False if these need a call each."""
        leaves, x, y = self._leaves(0), self.inputs[0], self.y
        with at_layer(self.training.called_module(), "for the gradient of one example", key="model.factory"):
            rows = [slice(i, i + 1) for i in range(len(y))]
            alone = [self._gradients(leaves, tree_map(lambda t, row=row: t[row], x), y[row]) for row in rows]
        try:
            gradients = self._example_gradients(leaves, x, y)
        except Exception:  # of a layer that vmap cannot run
            return False
        if self.training.draws:  # an example alone draws different numbers
            return True
        pairs = [(both[name][i], one) for both in gradients for i, own in enumerate(alone) for name, one in own.items()]
        return all(near(one, other, 1e-6) for one, other in pairs)

    def _example_gradients(self, leaves: Leaves, x: Any, y: Tensor) -> list[dict[str, Tensor]]:
        """Return the gradients of each example, ``[b, *shape]``, of one client and, if needed, of two together."""
        w = {name: leaf.detach() for name, leaf in leaves.items()}
        with drawing_with(0):
            gradients = [vmapped_gradients(self.training, labelled=True, stacked=False)(w, {}, x, y)]
        if self.steps.clients > 1:
            w, x, y = tree_map(lambda t: torch.stack([t, t]), (w, x, y))
            with drawing_with(0):
                both = vmapped_gradients(self.training, labelled=True, stacked=True)(w, {}, x, y)
            gradients += [{name: each[i] for name, each in both.items()} for i in range(2)]
        return gradients


def _differentiated(loss: Tensor, leaves: Mapping[str, Tensor], *, twice: bool) -> dict[str, Tensor]:
    """Return the gradient of a loss; with ``twice``, the gradient of the sum of its gradient."""
    gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=twice, materialize_grads=True)
    if twice:
        total = torch.stack([each.sum() for each in gradients]).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))
