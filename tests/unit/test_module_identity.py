"""Identity of modules: equal code, tensors and attributes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedloom.errors import ExperimentError
from fedloom.models.module import ModuleModel
from fedloom.models.module_facts import identity_of


class Counted(nn.Linear):
    calls = 0
    power = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(x**self.power)


def made(change: Callable[[nn.Linear], object] = lambda module: None) -> nn.Module:
    torch.manual_seed(0)
    module = Counted(4, 3)
    change(module)
    return module


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "value": lambda module: module.weight.data[0, 0].add_(1),
    "attribute": lambda module: setattr(module, "power", 2),
    "frozen": lambda module: module.bias.requires_grad_(False),
    "mode": lambda module: module.eval(),
    "tied": lambda module: setattr(module, "other", module.bias),
    "class": lambda module: setattr(module, "__class__", nn.Linear),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_modules_are_equal_only_with_equal_code_tensors_and_attributes(
    change: Callable[[nn.Linear], object],
) -> None:
    assert identity_of(made()) == identity_of(made()) is not None
    assert identity_of(made(change)) != identity_of(made())
    assert identity_of(made(), 3) != identity_of(made(), 2)


def test_a_reloaded_class_is_a_different_one() -> None:
    again = type("Counted", (nn.Linear,), {"__module__": __name__, "__qualname__": "Counted"})
    module, name = made(), globals()
    before, own = identity_of(module), Counted
    try:
        name["Counted"] = again
        module.__class__ = again
        assert identity_of(module) not in (None, before)
    finally:
        name["Counted"] = own


def test_modules_with_opaque_attributes_have_no_identity() -> None:
    assert identity_of(made(lambda module: setattr(module, "act", lambda x: x))) is None
    assert identity_of(made(lambda module: setattr(module, "lock", threading.Lock()))) is None


def test_a_module_is_checked_once_per_process() -> None:
    first = ModuleModel(made, (4,), 3, "features")
    calls = Counted.calls
    again = ModuleModel(made, (4,), 3, "features")
    assert Counted.calls == calls
    assert again.layout == first.layout
    with pytest.raises(ExperimentError):
        ModuleModel(made, (4,), 5, "features")  # other settings are checked again
    assert Counted.calls > calls
