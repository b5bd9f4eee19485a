"""Training steps of a module beyond the first check: of several clients, with second derivatives, on a device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedloom.core.draws import drawing_with
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel, Leaves
from fedloom.models.module_check import TrialData
from fedloom.models.module_compare import near
from fedloom.models.module_examples import ExampleTrial
from fedloom.models.module_inputs import ModuleInputs, mapped
from fedloom.models.module_layers import at_layer

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
