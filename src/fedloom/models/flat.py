"""Models as functions of one flat parameter vector θ in R^d."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from fedloom.errors import ExperimentError
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.classification import CLASSIFICATION


def vjp(output: Tensor, inputs: Sequence[Tensor], cotangent: Tensor, *, keep: bool = False) -> tuple[Tensor, ...]:
    """Return Jᵀ cotangent for each input; ``keep`` retains the graph for another call.

    The result equals ``autograd.grad(output, inputs, cotangent)``, which imports sympy on first use to check shapes:
    several seconds of every process's start.
    """
    return torch.autograd.grad((output * cotangent).sum(), inputs, retain_graph=keep)


def linear(parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Apply the linear layer of a name, ``[..., n] -> [..., m]``."""
    return F.linear(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"])


def linear_entries(widths: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the entries of linear layers fc1, fc2, ... between these widths."""
    entries: list[tuple[str, tuple[int, ...]]] = []
    for i, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        entries += [(f"fc{i}.weight", (outputs, inputs)), (f"fc{i}.bias", (outputs,))]
    return entries


class Leaves(dict[str, Tensor]):
    """Trained tensors by name. ``buffers`` can be looked up by name too, but are not items of the mapping.

    A call of the model in training mode moves the buffers in place.
    """

    def __init__(self, trained: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(trained)
        self.buffers = {} if buffers is None else buffers if isinstance(buffers, dict) else dict(buffers)

    def __missing__(self, name: str) -> Tensor:
        return self.buffers[name]


@dataclass(frozen=True)
class Layout:
    """Layout of θ: ``entries`` are (name, shape) in their order in the vector.

    Attributes
    ----------
    entries
        Names and shapes.
    headless
        True if the last entries do not belong to a final linear layer.
    last
        Layer whose entries, with all below it (``last.parametrizations.weight.original0``), form the head; None for the
        layer of the last entry.
    channels_last
        True if the model runs with convolution kernels in channels-last memory format.
    buffers
        Entries that training-mode calls move and gradients do not: running statistics and other averages. In the
        layout of a module they lie at the end of the body.
    local_buffers
        True if each client keeps its own values of the buffers, which are then not sent.
    normalization
        Entries of normalization layers, buffers included.
    logits_apart
        True if the logits are computed from the outputs of the head, rather than being these outputs.
    """

    entries: tuple[tuple[str, tuple[int, ...]], ...]
    headless: bool = False
    last: str | None = None
    channels_last: bool = True
    buffers: tuple[str, ...] = ()
    local_buffers: bool = False
    normalization: tuple[str, ...] = ()
    logits_apart: bool = False

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each entry."""
        return [math.prod(shape) for _, shape in self.entries]

    @cached_property
    def size(self) -> int:
        """Length d of θ."""
        return sum(self.sizes)

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """View θ [d] as named tensors; a gradient with respect to them flows to θ.

        Raise ValueError if the length of θ differs from this layout's.
        """
        if theta.shape != (self.size,):
            raise ValueError(f"θ has shape {tuple(theta.shape)}, but the layout needs ({self.size},)")
        parts = torch.split(theta, self.sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.entries, parts, strict=True)}

    def leaves(self, theta: Tensor, *, requires_grad: bool = False) -> dict[str, Tensor]:
        """Copy θ [d] into separate named tensors, with channels-last convolution kernels if the model runs with them.

        A CPU trains fastest in this form: θ is split once rather than at every step, and convolutions and poolings take
        channels-last kernels (docs/benchmarks.md).
        """
        leaves = {}
        for name, part in self.split(theta.detach()).items():
            kernel = part.dim() == 4 and self.channels_last
            memory = torch.channels_last if kernel else torch.contiguous_format
            leaves[name] = part.clone(memory_format=memory).requires_grad_(requires_grad and name not in self.buffers)
        return leaves

    def divided(self, leaves: Mapping[str, Tensor]) -> Leaves:
        """Return the named tensors of all entries as trained leaves, with the buffers apart."""
        if not self.buffers:
            return Leaves(leaves)
        trained = {name: leaf for name, leaf in leaves.items() if name not in self.buffers}
        return Leaves(trained, {name: leaves[name] for name in self.buffers})

    def mask(self, names: Container[str]) -> Tensor:
        """Return which coordinates of θ belong to some entries, ``[d]`` bool."""
        return torch.cat(
            [torch.full((size,), name in names) for (name, _), size in zip(self.entries, self.sizes, strict=True)]
        )

    @cached_property
    def head(self) -> tuple[str, ...]:
        """Entry names of the last linear layer, which are the last entries; empty if nothing precedes it."""
        if self.headless:
            return ()
        if self.last is not None:
            names = tuple(name for name, _ in self.entries if name.startswith(f"{self.last}."))
        else:
            last = self.entries[-1][0].rpartition(".")[0]
            names = tuple(name for name, _ in self.entries if last and name.rpartition(".")[0] == last)
        return names if len(names) < len(self.entries) else ()

    @cached_property
    def head_is_linear(self) -> bool:
        """True if the head is a weight [C, f] with an optional bias [C], so that logits are linear in it."""
        if self.logits_apart:
            return False
        kinds = [(name.rpartition(".")[2], len(shape)) for name, shape in self.entries if name in self.head]
        return kinds in ([("weight", 2)], [("weight", 2), ("bias", 1)])

    @cached_property
    def body_size(self) -> int:
        """Length of the part of θ before the head."""
        return sum(math.prod(shape) for name, shape in self.entries if name not in self.head)

    @cached_property
    def body(self) -> tuple[str, ...]:
        """Names of all trained entries outside the head."""
        return tuple(name for name, _ in self.entries if name not in self.head and name not in self.buffers)

    def join(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Concatenate named tensors into θ [d], the inverse of :meth:`split`."""
        return torch.cat([parameters[name].reshape(-1) for name, _ in self.entries])


class FlatNetwork(ABC):
    """Network that owns no parameters: ``layout`` describes θ, ``init`` draws it."""

    layout: Layout

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """Return the half-width of the uniform draw of one entry: by default PyTorch's 1/√fan_in for Linear and Conv2d.

        ``fan_in`` of a bias is that of the preceding weight. A network with another initialization overrides this.
        """
        del name, shape
        return 1 / math.sqrt(fan_in)

    def init(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw θ [d]: every entry uniform in ± its :meth:`bound`, in the order of the layout."""
        theta = torch.empty(self.layout.size, dtype=dtype)
        fan_in, start = 1, 0
        for name, shape in self.layout.entries:
            if name.endswith("weight"):
                fan_in = math.prod(shape[1:])
            bound = self.bound(name, shape, fan_in)
            # Drawn in float64 and rounded, so that a float64 network has the same starting point.
            draw = torch.rand(math.prod(shape), generator=generator, dtype=torch.float64)
            theta[start : start + len(draw)] = draw.mul_(2).sub_(1).mul_(bound)
            start += len(draw)
        return theta


class FlatModel(FlatNetwork):
    """Model with the ``loss`` that all methods train, by default the loss of its task.

    ``forward`` takes the named parameters, so that a training loop splits θ once, not at every step. Prediction and
    evaluation use the model itself; gradients for training use :meth:`in_training`.
    """

    task: PredictionTask = CLASSIFICATION
    """Task of the model: targets, loss and metrics."""

    draws: tuple[str, ...] = ()
    """Libraries whose global random generators training uses: ``torch``, ``numpy``, ``python``."""

    in_bfloat16: bool = False
    """True if convolutions and matrix products run in bfloat16."""

    needs_labels: bool = True
    """True if the loss uses labels."""

    raw_targets: bool = False
    """True if numbers as targets, and its outputs, are in their own units, because its loss takes them so."""

    needs_result: bool = False
    """True if its own loss takes more than its outputs, which can then not be changed before the loss."""

    has_features: bool = True
    """True if the model has a penultimate representation."""

    needs_whole_batches: bool = False
    """True if training normalizes by the batch, so that batches of several clients cannot be padded to one length."""

    least_batch: int = 1
    """Fewest examples of a training batch: 2 if a layer cannot normalize one."""

    constrained: bool = False
    """True if not every θ is a valid model, because a buffer is bounded: a variance is not negative."""

    predicts_by_batch: bool = False
    """True if predictions also depend on the other examples of their batch."""

    vmaps_examples: bool = True
    """False if ``torch.func.vmap`` cannot run it for single examples, whose gradients are then computed one by one."""

    constants: Mapping[str, Tensor] = MappingProxyType({})
    """Tensors outside θ that the outputs depend on, the same in every process: frozen parameters and fixed buffers."""

    tied: Mapping[str, str] = MappingProxyType({})
    """Further names of tensors that have several, with the name under which θ or the constants have them."""

    unsaved: frozenset[str] = frozenset()
    """Constants that a saved model leaves out, as ``state_dict`` does: buffers that are not persistent."""

    def in_training(self) -> FlatModel:
        """Return the model in training mode: itself, unless training computes something else."""
        return self

    def check_steps(
        self, *, clients: int = 1, twice: bool = False, device: torch.device | None = None, examples: bool = False
    ) -> None:
        """Check that the training steps of a run succeed, as those of built-in networks do.

        Raise ExperimentError if a step fails, if gradients of several clients together differ from those of each client
        alone, or, with ``examples``, if an example's output depends on others or a call moves buffers.

        Parameters
        ----------
        clients
            Clients vectorized together.
        twice
            True if gradients are differentiated, too.
        device
            Device of the run; None for the CPU.
        examples
            True if steps use the gradients of single examples (differential privacy of examples).
        """
        if examples and self.layout.buffers:
            raise ExperimentError(
                f"model.norm: {self.layout.buffers[0]} of this model depends on all examples of a batch, so that the "
                "contribution of one example cannot be clipped (federation.privacy.of: examples). Use norm: none, or "
                "a model with GroupNorm or LayerNorm",
                key="model.norm",
            )

    @abstractmethod
    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the penultimate representation, ``[b, *input_shape] -> [b, f]``."""

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits, ``[b, *input_shape] -> [b, C]``; by default a linear layer, the last entries, on features."""
        return linear(parameters, self.layout.entries[-1][0].rpartition(".")[0], self.features(parameters, x))

    def result(self, parameters: Mapping[str, Tensor], x: Tensor) -> Any:
        """Return what the model's own loss takes; by default the outputs of ``forward``."""
        return self.forward(parameters, x)

    def unshaped(self, outputs: Tensor) -> Any:
        """Return what the model's own loss takes, given the outputs of ``forward``."""
        return outputs

    def forward_together(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
        """Return the logits of g clients, ``[g, b, *input_shape] -> [g, b, C]``, of leaves ``[g, *shape]``.

        None by default: :func:`torch.func.vmap` of ``forward`` computes them then, at the cost of a small model's step.
        """
        del parameters, x
        return None

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return logits as a function of the flat vector, ``[d], [b, *input_shape] -> [b, C]``."""
        return self.forward(self.layout.split(theta), x)

    @property
    def own_loss(self) -> bool:
        """True if the model defines its own loss, other than its task's."""
        return type(self).loss is not FlatModel.loss

    @property
    def has_task_loss(self) -> bool:
        """True if the loss is the task's, of the outputs of ``forward``; a view can have another."""
        return not self.own_loss and "loss" not in vars(self)

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Return the loss of each example, ``[b, *input_shape], [b, ...] -> [b]``; by default the task's.

        ``y`` is None for data without labels, which only a model that needs no labels accepts.
        """
        assert y is not None
        return self.task.loss(self.forward(parameters, x), y)

    def batch_weights(self, y: Tensor | None, weight: Tensor) -> Tensor:
        """Return the weights of the losses of a batch, ``[..., b]``; see :meth:`PredictionTask.batch_weights`.

        Examples count alike in a model's own loss.
        """
        return weight if y is None or self.own_loss else self.task.batch_weights(y, weight)


FACTS = tuple(name for name in FlatModel.__annotations__ if name != "layout")
"""Names of the attributes that describe a model to its users."""


class DerivedModel(FlatModel):
    """Model that calls another one on the same inputs, and shares its ``FACTS``.

    Parameters
    ----------
    model
        Model that is called.
    layout
        Layout of this model's θ.
    """

    def __init__(self, model: FlatModel, layout: Layout) -> None:
        vars(self).update({name: getattr(model, name) for name in FACTS})
        self.model, self.layout = model, layout

    def in_training(self) -> FlatModel:
        """Return the same with the model in training mode."""
        view = copy.copy(self)
        view.model = self.model.in_training()
        return view

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the model's features."""
        return self.model.features(parameters, x)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the model's outputs."""
        return self.model.forward(parameters, x)

    def batch_weights(self, y: Tensor | None, weight: Tensor) -> Tensor:
        """Return the weights of the model that is called."""
        return self.model.batch_weights(y, weight)


def with_forward(model: FlatModel, forward: Callable[[Mapping[str, Tensor], Tensor], Tensor]) -> FlatModel:
    """Return the same model, including its own loss, with another ``forward``, in training too.

    For a view in training mode, pass ``model.in_training()``.
    """
    view = copy.copy(model)
    view.forward = forward  # type: ignore[assignment, method-assign]
    view.result = lambda parameters, x: model.unshaped(forward(parameters, x))  # type: ignore[method-assign]
    view.forward_together = lambda parameters, x: None  # type: ignore[method-assign]
    view.in_training = lambda: view  # type: ignore[method-assign]
    return view


def masked(model: FlatModel, absent: Tensor) -> FlatModel:
    """Return the model with the logits of some classes at -inf.

    Raise ExperimentError if the model's own loss takes more than the logits.

    Parameters
    ----------
    absent
        ``[C]`` bool.
    """
    if model.needs_result:
        raise ExperimentError(
            "mask_absent hides logits, but the loss of this model takes all that `forward` returns; set it to false",
            key="algorithm.local.mask_absent",
        )
    return with_forward(model, lambda parameters, x: model.forward(parameters, x).masked_fill(absent, -torch.inf))


def vmapped_gradients(model: FlatModel, *, labelled: bool, stacked: bool) -> Callable[..., dict[str, Tensor]]:
    """Return ``(chosen leaves, other leaves, x, y) -> gradients`` of each example by the chosen leaves.

    They are ``[b, *shape]``, or ``[g, b, *shape]`` of ``stacked`` clients. Random draws differ between examples.
    """
    axes, randomness = (0, 0 if labelled else None), "different" if model.draws else "error"
    of_client = vmap(grad(partial(example_loss, model)), in_dims=(None, None, *axes), randomness=randomness)
    return vmap(of_client, in_dims=(0, 0, *axes), randomness=randomness) if stacked else of_client


def example_loss(
    model: FlatModel, variables: Mapping[str, Tensor], others: Mapping[str, Tensor], x: Any, y: Tensor | None
) -> Tensor:
    """Return the loss of one example, without the axis of a batch, at leaves in two parts."""
    one = tree_map(lambda t: t[None], x)
    return model.loss(Leaves({**others, **variables}), one, None if y is None else y[None]).sum()


_Forward: TypeAlias = Callable[[Mapping[str, Tensor], Tensor], Any]


def bfloat16(model: FlatModel) -> FlatModel:
    """Return a model whose convolutions and matrix products run in bfloat16, forward and backward.

    θ, the logits, the loss and the gradients keep their type, so that small updates are not rounded away. PyTorch's
    autocast decides what is safe in between. A model in float64 is unaffected.
    """

    view = with_forward(model, _autocast(model.forward))
    view.in_bfloat16 = True
    view.result = _autocast(model.result)  # type: ignore[assignment, method-assign]
    view.features = _autocast(model.features)  # type: ignore[assignment, method-assign]
    view.in_training = lambda: bfloat16(model.in_training())  # type: ignore[method-assign]
    return view


def _autocast(function: _Forward) -> _Forward:
    """Return a function of parameters and inputs that computes in bfloat16, with outputs of the parameters' type."""

    def computed(parameters: Mapping[str, Tensor], x: Tensor) -> Any:
        like = next(iter(parameters.values()))
        with torch.autocast(like.device.type, torch.bfloat16):
            result = function(parameters, x)
        return tree_map(lambda t: t.to(like.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, result)

    return computed
