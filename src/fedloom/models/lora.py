"""Low-rank adapters of a module (LoRA, E. Hu et al., ICLR 2022, arXiv 2106.09685), added by ``peft``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from pydantic import Field
from torch import nn

from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError

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

    Raises
    ------
    ExperimentError
        When called, if ``peft`` is not installed, the module has adapters already, or no layer of these names.
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
        for key, wanted in (("targets", lora.targets), ("train", lora.train)):
            for end in wanted:
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
