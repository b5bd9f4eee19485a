"""Any ``nn.Module`` as the clients' model, as a function of its parameters; or why not, with the layer's name."""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from fedloom.errors import ExperimentError
from fedloom.models.factories import KEY, check_permitted
from fedloom.models.flat import FlatModel, Layout

MEMORY = "memory:"
"""How the factory of a module begins that only this process has."""

Factory: TypeAlias = Callable[[], nn.Module]

_IN_MEMORY: dict[str, nn.Module] = {}


class ModuleModel(FlatModel):
    """A module of torch as functions of a flat vector.

    Parameters
    ----------
    make
        Makes the module, from torch's random generator.
    input_shape, classes, kind
        What goes in, and C.
    head
        The name of the layer whose output are the logits; None: the last linear layer, if that is so.
    initial
        Where training starts: ``module``, as ``make`` makes it; ``drawn``, as built-in networks start.

    Raises
    ------
    ExperimentError
        If it cannot be flattened: the layer, what was found and what is allowed.
    """

    def __init__(
        self,
        make: Factory,
        input_shape: tuple[int, ...],
        classes: int,
        kind: str,
        head: str | None = None,
        initial: Literal["module", "drawn"] = "module",
    ) -> None:
        self._make = make
        self._initial = initial
        self._module = _seeded(make, 0)
        _check_layers(self._module)
        x = _inputs(input_shape, kind)
        _check_outputs(self._module, x, classes)
        self._head = _head(self._module, x, head)
        self.has_features = self._head is not None
        named = {name: tuple(p.shape) for name, p in self._module.named_parameters()}
        last = [name for name in named if self._head is not None and name.rpartition(".")[0] == self._head]
        names = [*(name for name in named if name not in last), *last]
        self.layout = Layout(tuple((name, named[name]) for name in names), headless=self._head is None)
        self._copies = threading.local()  # a call puts its parameters into the module, which threads may not share

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleModel:
        """Return it as it is: nothing changes it."""
        return self

    def init(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        """θ [d]: as the module is made, with torch's generator seeded by this one; or drawn."""
        if self._initial == "drawn":
            return super().init(generator, dtype)
        made = _seeded(self._make, int(torch.randint(2**62, (1,), generator=generator)))
        return self.layout.join({name: p.detach() for name, p in made.named_parameters()}).to(dtype)

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """What goes into the head, ``[b, *input_shape] -> [b, f]``."""
        assert self._head is not None, "has_features is False"
        function, taken = self._own(), list[Tensor]()
        layer = function.module.get_submodule(self._head)
        hook = layer.register_forward_pre_hook(lambda _, given: taken.append(given[0]))
        try:
            function(parameters, x)
        finally:
            hook.remove()
        return taken[0].flatten(1)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """``[b, *input_shape] -> [b, C]`` logits."""
        return self._own()(parameters, x)

    @property
    def own_loss(self) -> bool:
        """Whether the module has a ``loss``."""
        return hasattr(self._module, "loss")

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Loss of each example, ``[b]``: the module's own ``loss(logits, y)``, if it has one."""
        if not self.own_loss:
            return super().loss(parameters, x, y)
        found: Tensor = self._module.loss(self.forward(parameters, x), y)  # type: ignore[operator]  # a method
        return found

    def _own(self) -> _Function:
        """This thread's copy of the module, as a function."""
        if not hasattr(self._copies, "function"):
            self._copies.function = _Function(copy.deepcopy(self._module))
        found: _Function = self._copies.function
        return found


class _Function:
    """A module as a function of its parameters.

    What ``torch.func.functional_call`` does, without looking for the places of the parameters at each call: that would
    be 3 % of a step of LeNet.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        first: dict[int, str] = {}
        self._places: list[tuple[dict[str, Tensor | None], str, str]] = []
        for prefix, layer in module.named_modules():
            for key, p in layer._parameters.items():
                if p is not None:  # one that several layers share has its first name
                    name = first.setdefault(id(p), f"{prefix}.{key}" if prefix else key)
                    self._places.append((layer._parameters, key, name))
        self._own = [held[key] for held, key, _ in self._places]
        self._device: torch.device | None = None

    def __call__(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if x.device != self._device:
            for layer in self.module.modules():
                for key, b in layer._buffers.items():
                    layer._buffers[key] = None if b is None else b.to(x.device)
            self._device = x.device
        try:
            for held, key, name in self._places:
                held[key] = parameters[name]
            found: Tensor = self.module(x)
        finally:
            for (held, key, _), own in zip(self._places, self._own, strict=True):
                held[key] = own
        return found


def remember(module: nn.Module, name: str | None = None) -> str:
    """Let experiments of this process name a module, and return what they call it.

    Parameters
    ----------
    name
        What a run calls it, whose weights may be others; None: it is named after its class, a hash of its layers and a
        hash of its weights.

    Raises
    ------
    ExperimentError
        If it is none, or not the one that the run trained.
    """
    if not isinstance(module, nn.Module):
        raise ExperimentError(f"model: found a {type(module).__name__}; allowed: an nn.Module")
    layers, weights = hashlib.sha256(repr(module).encode()), hashlib.sha256()
    buffers = dict(module.named_buffers())
    for key, tensor in [*module.named_parameters(), *buffers.items()]:
        if is_lazy(tensor):
            continue  # it is refused when it is looked at
        layers.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = layers if key in buffers else weights  # buffers are constants, which no run stores
        values.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    kind = f"{MEMORY}{type(module).__name__}-{layers.hexdigest()[:12]}"
    if name is None:
        name = f"{kind}-{weights.hexdigest()[:12]}"
    elif not name.startswith(f"{kind}-"):
        allowed = "a module with the same layers" if name.startswith(MEMORY) else "none"
        raise ExperimentError(f"model: found {kind}, and the run trained {name}; allowed: {allowed}")
    _IN_MEMORY[name] = copy.deepcopy(module)
    return name


def factory_of(name: str, input_shape: tuple[int, ...], classes: int) -> Factory:
    """Return what makes a module.

    Parameters
    ----------
    name
        ``package.module:function``, which is called with those of ``input_shape`` and ``classes`` that it has
        parameters for; or what :func:`remember` returned.

    Raises
    ------
    ExperimentError
        If there is no such function, this process may not call it, or another process has the module.
    """
    if name.startswith(MEMORY):
        if name not in _IN_MEMORY:
            raise ExperimentError(
                f"{KEY}: found {name}, a module that another process had in memory; allowed: package:function",
                hint="in Python, fedloom.load(RUN, model=module) says which module it is",
            )
        return lambda: copy.deepcopy(_IN_MEMORY[name])
    check_permitted(name)
    package, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(package), function)
    except Exception as error:
        raise ExperimentError(
            f"{KEY}: found {name!r}, which cannot be imported ({type(error).__name__}: {error}); allowed: "
            "package:function",
            hint="install its package, or name its folder in PYTHONPATH",
        ) from error
    try:
        known = inspect.signature(made).parameters
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{KEY}: found {name!r}, which is no function; allowed: package:function") from error
    given = {key: value for key, value in (("input_shape", input_shape), ("classes", classes)) if key in known}

    def make() -> nn.Module:
        try:
            found = made(**given)
        except Exception as error:
            raise ExperimentError(f"{KEY}: {name} failed ({type(error).__name__}: {error})") from error
        if not isinstance(found, nn.Module):
            raise ExperimentError(f"{KEY}: {name} returned a {type(found).__name__}; allowed: an nn.Module")
        return found

    return make


def _seeded(make: Factory, seed: int) -> nn.Module:
    """A module made with torch's random generator at a seed, which is then as it was before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make().train()


def _named(name: str, layer: nn.Module) -> str:
    """A layer in an error; the module itself has no name."""
    return f"{KEY}: layer {name!r} ({type(layer).__name__})" if name else f"{KEY}: {type(layer).__name__}"


def _check_layers(module: nn.Module) -> None:
    """Refuse what is not a function of parameters and inputs."""
    for name, layer in module.named_modules():
        where = _named(name, layer)
        if any(is_lazy(p) for p in layer.parameters(recurse=False)):
            raise ExperimentError(
                f"{where} makes its parameters at run time; allowed: layers that have theirs from the start"
            )
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _NormBase) and layer.track_running_stats):
            raise ExperimentError(
                f"{where} normalizes by the batch and keeps running statistics; allowed: GroupNorm or LayerNorm"
            )
        rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ExperimentError(
                f"{where} drops at random (p = {rate:g}), and no run could be repeated; allowed: p = 0"
            )
        for key, p in layer.named_parameters(recurse=False):
            if not p.requires_grad:
                raise ExperimentError(f"{where}: {key} is frozen; allowed: parameters that are trained, and buffers")
            if p.dtype != torch.float32:
                raise ExperimentError(f"{where}: {key} is {p.dtype}; allowed: torch.float32")
    if next(module.parameters(), None) is None:
        raise ExperimentError(f"{KEY}: {type(module).__name__} has no parameters; allowed: some to train")


def _inputs(input_shape: tuple[int, ...], kind: str) -> Tensor:
    """Three inputs of the kind, by which a module is tried."""
    generator = torch.Generator().manual_seed(0)
    if kind == "tokens":
        return torch.randint(2, (3, *input_shape), generator=generator, dtype=torch.uint8)
    return torch.randn(3, *input_shape, generator=generator)


def _check_outputs(module: nn.Module, x: Tensor, classes: int) -> None:
    """Try a module, and refuse one whose outputs are no logits, or which changes as it is called."""
    what = f"{KEY}: {type(module).__name__}"
    before = {name: b.clone() for name, b in module.named_buffers()}
    names = {name for name, _ in module.named_parameters()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            torch.default_generator.manual_seed(1)
            first = module(x)
            torch.default_generator.manual_seed(2)
            second = module(x)
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            raise ExperimentError(
                f"{what} cannot take inputs {list(x.shape)} ({type(error).__name__}: {said})"
            ) from error
    if not isinstance(first, Tensor) or first.shape != (len(x), classes) or not first.is_floating_point():
        found = f"{first.dtype} {list(first.shape)}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        raise ExperimentError(f"{what} gives {found} for {len(x)} inputs; allowed: logits, [{len(x)}, {classes}]")
    made = sorted({name for name, _ in module.named_parameters()} - names)
    if made:
        layer = made[0].rpartition(".")[0]
        raise ExperimentError(
            f"{_named(layer, module.get_submodule(layer))} makes its parameters at run time ({made[0]}); allowed: "
            "layers that have theirs from the start"
        )
    for name, b in module.named_buffers():
        if name not in before or not torch.equal(before[name], b):
            layer = name.rpartition(".")[0]
            raise ExperimentError(
                f"{_named(layer, module.get_submodule(layer))} changes its buffer {name} when it is called; allowed: "
                "constants"
            )
    if not torch.equal(first, second):
        raise ExperimentError(f"{what} gives other outputs for the same inputs; allowed: nothing drawn at random")
    if hasattr(module, "loss"):
        try:
            losses = module.loss(first, torch.zeros(len(x), dtype=torch.long))  # type: ignore[operator]
        except Exception as error:
            raise ExperimentError(
                f"{what}.loss(logits, y) failed ({type(error).__name__}: {error}); allowed: a loss of each example"
            ) from error
        if not isinstance(losses, Tensor) or losses.shape != (len(x),):
            found = f"{list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise ExperimentError(f"{what}.loss gives {found} for {len(x)} examples; allowed: one each, [{len(x)}]")


def _head(module: nn.Module, x: Tensor, asked: str | None) -> str | None:
    """The name of the layer whose outputs are the logits; None if none is, and none was asked for."""
    layers = dict(module.named_modules())
    linear = [name for name, layer in layers.items() if name and isinstance(layer, nn.Linear)]
    if asked is not None and asked not in linear:
        raise ExperimentError(
            f"model.head: found {asked!r}; allowed: a linear layer: {', '.join(linear) or 'there is none'}"
        )
    fits = [name for name in ([asked] if asked is not None else linear[::-1]) if _ends_in(module, layers[name], x)]
    if asked is not None and not fits:
        raise ExperimentError(
            f"model.head: found {asked!r}, whose outputs are not the logits; allowed: a layer whose are"
        )
    return fits[0] if fits else None


def _ends_in(module: nn.Module, layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer is called once, with rows of features, and its outputs are those of the module."""
    given: list[tuple[Tensor, Tensor]] = []
    hook = layer.register_forward_hook(lambda _, inputs, output: given.append((inputs[0], output)))
    try:
        with torch.no_grad():
            logits = module(x)
    finally:
        hook.remove()
    return len(given) == 1 and given[0][0].dim() == 2 and torch.equal(given[0][1], logits)
