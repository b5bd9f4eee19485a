"""State of a local training between two steps, from which it continues after its process was killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedloom.algorithms.local_sgd import LocalStep
from fedloom.models.flat import Leaves


class Progress(Protocol):
    """Saves of the local trainings of a conversation, which are numbered. It knows files and clocks."""

    def begin(self, training: int) -> Mapping[str, Tensor] | None:
        """Begin a training; return its last save, if there is one of the same question."""

    def is_due(self, *, finished: bool = False) -> bool:
        """Return whether to save the training that has begun last, after a step or after its last step."""

    def save(self, training: int, state: Mapping[str, Tensor]) -> None:
        """Save a training, replacing its earlier save."""

    def ends(self, steps_left: int) -> bool:
        """Return whether to end the training that has begun last, before its last step, to measure its time."""


class LoopState:
    """Everything that the steps of a local training change, beside the random draws of their batches.

    Parameters
    ----------
    models
        Parameters and buffers of each model that is trained.
    tensors
        Further tensors that steps change in place.
    histories
        Lists to which every step appends the same number of tensors of one shape.
    optimizers
        Optimizers, with their memory.
    generators
        Generators that steps draw from, other than those of the batches.
    """

    def __init__(
        self,
        *models: Leaves,
        tensors: Sequence[Tensor] = (),
        histories: Sequence[list[Tensor]] = (),
        optimizers: Sequence[LocalStep] = (),
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._models, self._tensors, self._histories = models, tensors, histories
        self._optimizers, self._generators = optimizers, generators

    def _in_place(self) -> dict[str, Tensor]:
        tensors = {f"tensor/{i}": tensor for i, tensor in enumerate(self._tensors)}
        for i, model in enumerate(self._models):
            tensors |= {f"model/{i}/{name}": tensor for name, tensor in (*model.items(), *model.buffers.items())}
        return tensors

    def read(self, *, finished: bool) -> dict[str, Tensor]:
        """Return the tensors by name, without copying those that are changed in place."""
        tensors = self._in_place() | {
            f"history/{i}": torch.stack(history) for i, history in enumerate(self._histories) if history
        }
        if not finished:
            for i, optimizer in enumerate(self._optimizers):
                tensors |= {f"optimizer/{i}/{j}": tensor for j, tensor in enumerate(optimizer.memory())}
        return tensors | {f"generator/{i}": generator.get_state() for i, generator in enumerate(self._generators)}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Change everything to the state in a save."""
        places = self._in_place()
        device = next(iter(places.values())).device
        for name, tensor in places.items():
            tensor.copy_(saved[name])
        for i, history in enumerate(self._histories):
            history[:] = saved[f"history/{i}"].to(device).unbind() if f"history/{i}" in saved else []
        for i, optimizer in enumerate(self._optimizers):
            names = [name for name in saved if name.startswith(f"optimizer/{i}/")]
            optimizer.remember([saved[f"optimizer/{i}/{j}"] for j in range(len(names))])
        for i, generator in enumerate(self._generators):
            generator.set_state(saved[f"generator/{i}"])
