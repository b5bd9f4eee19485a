"""Training steps of a module beyond the first check: of several clients, with second derivatives, on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedloom.core.draws import drawing_with
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel, Leaves
from fedloom.models.module_call import ModuleInputs, mapped
from fedloom.models.module_check import TrialData
from fedloom.models.module_draws import near
from fedloom.models.module_layers import at_layer, hooks, named

CPU = torch.device("cpu")

KEY_STACKED = "runtime.clients_at_once"


class Steps(NamedTuple):
    """Training steps of a run: the arguments of :meth:`FlatModel.check_steps`."""

    clients: int = 1
    twice: bool = False
    device: torch.device = CPU
    examples: bool = False


def check_steps(model: FlatModel, data: TrialData, steps: Steps) -> None:
    """Make training steps with a model that calls a module, and reject those that fail.

    Parameters
    ----------
    data
        Trial inputs and targets.

    Raises
    ------
    ExperimentError
        If a step fails, with its layer and the key to change, or if clients get different results together than alone.
    """
    if steps != Steps() or model.in_bfloat16:
        _Trial(model, data, steps).check()


class _Trial:
    """Model and two clients on which it is tried."""

    def __init__(self, model: Any, data: TrialData, steps: Steps) -> None:
        self.model, self.training, self.steps = model, model.in_training(), steps
        generator = torch.Generator().manual_seed(0)
        theta = model.init(generator)
        scale = 0.5 + torch.rand(len(theta), generator=generator)  # keeps variances positive
        self.thetas = [theta.to(steps.device), (theta * scale).to(steps.device)]
        self.inputs = [mapped(x, lambda t: t.to(steps.device)) for x in (data.x, data.others)]
        self.y = data.y.to(steps.device)

    def check(self) -> None:
        """Make the steps."""
        if self.steps.examples:
            examples = ExampleTrial(self.training, self._leaves(0), self.inputs[0], self.inputs[1], self.y)
            self.model.take_examples(vmapped=examples.check(stacked=self.steps.clients > 1))
        alone = [self._step(i) for i in range(2)]
        if self.steps.clients == 1:
            return
        together, predicted = self._steps_together(), self._predicted_together()
        pairs = [("its outputs differ", predicted[i], self._predicted(i)) for i in range(2)]
        if not self.training.draws:  # together they draw different numbers
            for name, both in together.items():
                pairs += [(f"the gradient of {name} differs", both[i], alone[i][name]) for i in range(2)]
        for what, several, one in pairs:
            if not near(several, one):
                raise ExperimentError(
                    f"{KEY_STACKED}: {what} when several clients are trained together; set it to 1",
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
        where = "" if self.steps.device == CPU else f" on {self.steps.device.type}"
        with at_layer(self.training.called_module(), f"in a training step{where}", hint=hint, key=key):
            found = self._gradients(i)
        with at_layer(self.model.called_module(), f"in a prediction{where}", hint=hint, key=key):
            self._predicted(i)
        if self.steps.twice:
            hint = "; choose a first-order variant of the method, or layers with second derivatives"
            with at_layer(self.training.called_module(), "when its gradient is differentiated", hint=hint):
                self._gradients(i, twice=True)
        return found

    def _gradients(self, i: int, *, twice: bool = False) -> dict[str, Tensor]:
        leaves = self._leaves(i)
        with torch.enable_grad(), drawing_with(0):
            return _differentiated(self.training.loss(leaves, self.inputs[i], self.y).mean(), leaves, twice=twice)

    @torch.no_grad()
    def _predicted(self, i: int) -> Tensor:
        found: Tensor = self.model.forward(self._leaves(i), self.inputs[i])
        return found

    # Two clients together, as the trainer stacks them

    def _both(self) -> tuple[Leaves, ModuleInputs]:
        both, (first, second) = [self._leaves(i) for i in range(2)], self.inputs
        stacked = {name: torch.stack([one[name].detach() for one in both]).requires_grad_() for name in both[0]}
        buffers = {name: torch.stack([one.buffers[name] for one in both]) for name in both[0].buffers}
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return Leaves(stacked, buffers), torch.stack([first, second])
        assert isinstance(first, Mapping)
        assert isinstance(second, Mapping)
        return Leaves(stacked, buffers), {name: torch.stack([each, second[name]]) for name, each in first.items()}

    def _at_layer(self, model: Any) -> AbstractContextManager[None]:
        hint = f"; set {KEY_STACKED} to 1"
        return at_layer(model.called_module(), "for several clients together", hint=hint, key=KEY_STACKED)

    @torch.no_grad()
    def _predicted_together(self) -> Tensor:
        leaves, x = self._both()
        with self._at_layer(self.model):
            together = vmap(lambda w, b, x: self.model.forward(Leaves(w, b), x))
            found: Tensor = together(dict(leaves), leaves.buffers, x)
        return found

    def _steps_together(self) -> dict[str, Tensor]:
        (leaves, x), y = self._both(), torch.stack([self.y, self.y])
        losses = vmap(partial(_mean_loss, self.training), randomness="different" if self.training.draws else "error")
        found: dict[str, Tensor] = {}
        with torch.enable_grad(), drawing_with(0), self._at_layer(self.training):
            for twice in (True, False) if self.steps.twice else (False,):
                buffers = {name: b.clone() for name, b in leaves.buffers.items()}
                found = _differentiated(losses(dict(leaves), buffers, x, y).sum(), leaves, twice=twice)
        return found


def _mean_loss(model: FlatModel, leaves: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return model.loss(Leaves(leaves, buffers), x, y).mean()


def _differentiated(loss: Tensor, leaves: Mapping[str, Tensor], *, twice: bool) -> dict[str, Tensor]:
    """Return the gradient of a loss; with ``twice``, that of the sum of its gradient."""
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=twice, materialize_grads=True)
    if twice:
        total = torch.stack([each.sum() for each in found]).sum()
        found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


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
