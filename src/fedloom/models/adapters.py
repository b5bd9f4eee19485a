"""Adapters of ``peft``: low-rank ones added to a module (LoRA), and the files that ``from_pretrained`` opens.

LoRA: E. Hu et al., ICLR 2022, arXiv 2106.09685.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import safetensors.torch
from pydantic import Field
from torch import Tensor, nn

from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel
from fedloom.models.module import ModuleModel

Name: TypeAlias = Annotated[str, Field(min_length=1)]


class LoRA(Settings):
    """Adapters W + (alpha / rank) B A of some layers, A drawn and B = 0 at the start; all other layers are frozen."""

    rank: int = Field(default=8, ge=1, description="rank r of the adapters: A is [r, inputs], B is [outputs, r]")
    alpha: float = Field(default=16.0, gt=0, description="the adapters' output is scaled by alpha / rank")
    targets: list[Name] = Field(
        min_length=1, description="layers that get adapters, by the end of their names, such as [query, value]"
    )
    layers: list[int] | None = Field(
        default=None, min_length=1, description="numbers of the blocks that get adapters; null: all"
    )
    train: list[Name] = Field(
        default=[],
        description="layers that are trained in full in addition to the adapters, such as the head: [classifier]",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout of the adapters' inputs in training")


def adapted(make: Callable[[], nn.Module], lora: LoRA) -> Callable[[], nn.Module]:
    """Return a factory that adds adapters to the module that ``make`` returns.

    Raise ExperimentError when called, if ``peft`` is not installed, the module has adapters already, or no layer of
    these names.
    """

    def made() -> nn.Module:
        try:
            import peft
        except ImportError as error:
            raise ExperimentError(
                "model.lora: adapters need the package peft, which is not installed",
                hint="pip install 'fedloom[adapters]'",
                key="model.lora",
            ) from error
        base = make()
        if any(isinstance(layer, peft.PeftModel) for layer in base.modules()):
            raise ExperimentError(
                "model.lora: the factory returns a module with adapters; leave model.lora out", key="model.lora"
            )
        names = [name for name, _ in base.named_modules() if name]
        for key, pattern in (("targets", lora.targets), ("train", lora.train)):
            for end in pattern:
                if not any(name == end or name.endswith(f".{end}") for name in names):
                    linear = ", ".join(name for name, layer in base.named_modules() if isinstance(layer, nn.Linear))
                    raise ExperimentError(
                        f"model.lora.{key}: no layer is named {end!r}; the linear layers are {linear or 'none'}",
                        key=f"model.lora.{key}",
                        found=end,
                    )
        config: dict[str, Any] = {
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": list(lora.targets),
            "layers_to_transform": lora.layers,
            "modules_to_save": list(lora.train) or None,
            "lora_dropout": lora.dropout,
        }
        try:
            adapters: nn.Module = peft.get_peft_model(base, peft.LoraConfig(**config))
        except ValueError as error:
            raise ExperimentError(f"model.lora: peft adds no adapters ({error})", key="model.lora") from error
        return adapters

    return made


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Names of peft's files."""

BESIDE = "trained_beside.safetensors"
"""File of tensors that were trained but belong to no adapter: a ``state_dict`` by the whole module's names."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def adapter_files(model: FlatModel | None, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the files of an adapter by name.

    Raise ExperimentError if the model is not a module with one adapter of ``peft``, or if the adapter needs a modified
    base.

    Parameters
    ----------
    model
        Model of the client; None if its predictor consists of more than the parameters of a network.
    tensors
        Its trained tensors and constants, by the module's names.
    """
    module = model.called_module() if isinstance(model, ModuleModel) else None
    prefix, adapters = _adapters_in(module)
    from peft import get_peft_model_state_dict

    (name,) = adapters.peft_config
    _check_base(adapters.peft_config[name])
    own = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    with tempfile.TemporaryDirectory() as folder:
        adapters.save_pretrained(folder, save_embedding_layers=False, state_dict=dict(own))
        source = Path(folder) if name == "default" else Path(folder) / name
        files = {file: (source / file).read_bytes() for file in (CONFIG, WEIGHTS)}
    assert model is not None
    saved_tensors = get_peft_model_state_dict(adapters, dict(own), adapter_name=name, save_embedding_layers=False)
    saved_ids = {id(t) for t in saved_tensors.values()}
    beside = {key: tensors[key].contiguous() for key, _ in model.layout.entries if id(tensors[key]) not in saved_ids}
    return {**files, BESIDE: safetensors.torch.save(beside)} if beside else files


def _adapters_in(module: nn.Module | None) -> tuple[str, Any]:
    """Return the name, with a dot, and the layer of ``peft`` in a module."""
    reason = "the client's model is not a module with adapters of peft"
    try:
        import peft
    except ImportError:
        module = None
    peft_modules = (
        [] if module is None else [(n, m) for n, m in module.named_modules() if isinstance(m, peft.PeftModel)]
    )
    if len(peft_modules) == 1 and len(peft_modules[0][1].peft_config) == 1:
        name, adapters = peft_modules[0]
        return f"{name}." if name else "", adapters
    if peft_modules:
        count = max(len(peft_modules), len(peft_modules[0][1].peft_config))
        reason = f"the client's model has {count} adapters, but a folder holds only one"
    raise ExperimentError(
        f"This model cannot be saved as .peft: {reason}.", hint="save it as .safetensors, .pt2 or .onnx", key="out"
    )


def _check_base(config: Any) -> None:
    """Refuse adapters whose initialization changes the base's own weights, which the folder does not hold."""
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise ExperimentError(
            f"This model cannot be saved as .peft: init_lora_weights={init!r} changes the weights of the base, and the "
            "folder holds only the adapter.",
            hint="save it as .safetensors, .pt2 or .onnx",
            key="out",
            found=init,
        )
