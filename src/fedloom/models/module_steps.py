"""Training steps of a module as a run makes them, beyond those of the first check: together, twice, on a device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedloom.core.draws import seeded
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel
from fedloom.models.module_check import Trial
from fedloom.models.module_compare import near
from fedloom.models.module_inputs import mapped
from fedloom.models.module_layers import at_layer

CPU = torch.device("cpu")

KEY_STACKED = "runtime.clients_at_once"


class Steps(NamedTuple):
    """Training steps of a run.

    Attributes
    ----------
    clients
        Clients vectorized together (``runtime.clients_at_once``).
    twice
        True if gradients are differentiated, too.
    device
        Device of the run.
    """

    clients: int = 1
    twice: bool = False
    device: torch.device = CPU


class CallsModule(Protocol):
    """Model that calls a module."""

    def called_module(self) -> nn.Module:
        """Return the module that this thread's calls run."""


def check_steps(model: FlatModel, data: Trial, steps: Steps) -> None:
    """Make training steps with a model that calls a module, and reject those that fail.

    Parameters
    ----------
    data
        Trial inputs and targets.

    Raises
    ------
    ExperimentError
        If a step fails, with its layer and the key to change, or if clients together get other gradients than alone.
    """
    stacked = steps.clients > 1
    if stacked or steps.twice or steps.device != CPU or model.in_bfloat16:
        _Trial(model, data, steps).check()


class _Trial:
    """Model and the clients on which it is tried: two if they are vectorized."""

    def __init__(self, model: FlatModel, data: Trial, steps: Steps) -> None:
        self.model, self.training, self.steps = model, model.in_training(), steps
        generator = torch.Generator().manual_seed(0)
        theta = model.init(generator)
        scale = 0.5 + torch.rand(len(theta), generator=generator)
        self.thetas = [theta.to(steps.device), (theta * scale).to(steps.device)]
        self.inputs = [mapped(x, lambda t: t.to(steps.device)) for x in (data.x, data.others)]
        self.y = data.y.to(steps.device)

    def check(self) -> None:
        """Make the steps."""
        alone = [self._step(i) for i in range(2)]
        if self.steps.clients == 1:
            return
        together = self._steps_together(self.training)
        compared = [("a gradient", alone, together)]
        if self.training.draws:  # together they draw other numbers
            plain = [self._gradients(self.model, self._leaves(i), i) for i in range(2)]
            compared = [("a gradient", plain, self._steps_together(self.model))]
        for what, one, several in compared:
            for name in one[0]:
                if not all(near(several[name][i], one[i][name]) for i in range(2)):
                    raise self._rejected(
                        name.rpartition(".")[0],
                        f"{what} of {name} differs when several clients are trained together",
                    )

    def _leaves(self, i: int) -> dict[str, Tensor]:
        return self.model.layout.leaves(self.thetas[i], requires_grad=True)

    def _step(self, i: int) -> dict[str, Tensor]:
        """Make a step of one client, and return its gradient."""
        at = f"in a training step on {self.steps.device.type}" if self.steps.device != CPU else "in a training step"
        leaves = self._leaves(i)
        module = self.training.called_module()  # type: ignore[attr-defined]
        hint, key = ("; set model.precision to float32", "model.precision") if self.model.in_bfloat16 else ("", None)
        with at_layer(module, at, hint=hint, key=key):
            found = self._gradients(self.training, leaves, i)
        predicting = self.model.called_module()  # type: ignore[attr-defined]
        with at_layer(predicting, "when it predicts", hint=hint, key=key), torch.no_grad():
            self.model.forward(leaves, self.inputs[i])  # type: ignore[arg-type]
        if self.steps.twice:
            hint = "; choose a first-order variant of the method, or layers with second derivatives"
            with at_layer(module, "when its gradient is differentiated, as this method does", hint=hint):
                self._gradients(self.training, leaves, i, twice=True)
        return found

    def _gradients(
        self, model: FlatModel, leaves: Mapping[str, Tensor], i: int, *, twice: bool = False
    ) -> dict[str, Tensor]:
        with torch.enable_grad(), seeded(0):
            loss = model.loss(leaves, self.inputs[i], self.y).mean()  # type: ignore[arg-type]
            return _differentiated(loss, leaves, twice=twice)

    def _steps_together(self, model: FlatModel) -> dict[str, Tensor]:
        """Make a step of two clients together, as the trainer does, and return their gradients."""
        both = [self._leaves(i) for i in range(2)]
        leaves = {name: torch.stack([one[name].detach() for one in both]).requires_grad_() for name in both[0]}
        first, second = self.inputs
        x = (
            torch.stack([first, second])  # type: ignore[list-item]
            if isinstance(first, Tensor)
            else {name: torch.stack([each, second[name]]) for name, each in first.items()}  # type: ignore[index]
        )
        losses = vmap(partial(_mean_loss, model), randomness="different" if model.draws else "error")
        module = model.called_module()  # type: ignore[attr-defined]
        hint = "; set runtime.clients_at_once to 1"
        with (
            torch.enable_grad(),
            seeded(0),
            at_layer(module, "for several clients together", hint=hint, key=KEY_STACKED),
        ):
            loss = losses(leaves, x, torch.stack([self.y, self.y])).sum()
            found = _differentiated(loss, leaves, twice=False)
            if self.steps.twice:
                _differentiated(losses(leaves, x, torch.stack([self.y, self.y])).sum(), leaves, twice=True)
        return found

    def _rejected(self, layer: str, why: str) -> ExperimentError:
        return ExperimentError(
            f"runtime.clients_at_once: layer {layer!r} of the module: {why}; set it to 1",
            key=KEY_STACKED,
            found=self.steps.clients,
            allowed=1,
        )


def _mean_loss(model: FlatModel, leaves: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return model.loss(leaves, x, y).mean()


def _differentiated(loss: Tensor, leaves: Mapping[str, Tensor], *, twice: bool) -> dict[str, Tensor]:
    """Return the gradient of a loss; with ``twice``, that of the sum of its gradient."""
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=twice, materialize_grads=True)
    if twice:
        total = torch.stack([each.sum() for each in found]).sum()
        found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))
