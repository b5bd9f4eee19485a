"""Adapters of ``peft`` in a client's model, as the files that ``PeftModel.from_pretrained`` opens."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel
from fedloom.models.module import ModuleModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Names of peft's files."""

BESIDE = "trained_beside.safetensors"
"""File of tensors that were trained but belong to no adapter: a ``state_dict`` by the whole module's names."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def adapter_files(model: FlatModel | None, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the files of an adapter by name.

    Parameters
    ----------
    model
        Model of the client; None if its predictor consists of more than the parameters of a network.
    tensors
        Its trained tensors and constants, by the module's names.

    Raises
    ------
    ExperimentError
        If the model is not a module with one adapter of ``peft``, or if the adapter needs a modified base.
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
    saved = get_peft_model_state_dict(adapters, dict(own), adapter_name=name, save_embedding_layers=False)
    kept = {id(t) for t in saved.values()}
    beside = {key: tensors[key].contiguous() for key, _ in model.layout.entries if id(tensors[key]) not in kept}
    return {**files, BESIDE: safetensors.torch.save(beside)} if beside else files


def _adapters_in(module: nn.Module | None) -> tuple[str, Any]:
    """Return the name, with a dot, and the layer of ``peft`` in a module."""
    why = "the client's model is not a module with adapters of peft"
    try:
        import peft
    except ImportError:
        module = None
    found = [] if module is None else [(n, m) for n, m in module.named_modules() if isinstance(m, peft.PeftModel)]
    if len(found) == 1 and len(found[0][1].peft_config) == 1:
        name, adapters = found[0]
        return f"{name}." if name else "", adapters
    if found:
        count = max(len(found), len(found[0][1].peft_config))
        why = f"the client's model has {count} adapters, but a folder holds only one"
    raise ExperimentError(
        f"This model cannot be saved as .peft: {why}.", hint="save it as .safetensors, .pt2 or .onnx", key="out"
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
