"""FedSA-LoRA: the A matrices of low-rank adapters are averaged, and the B matrices stay with the clients.

P. Guo, S. Zeng, Y. Wang, H. Fan, F. Wang, L. Qu, Selective aggregation for low-rank adaptation in federated learning,
ICLR 2025, arXiv 2410.01463. A client trains both matrices of each update BA; B is its state between rounds, and is
never sent. Patterns of names choose the parameters that a client keeps, so these can be others. Line numbers refer to
docs/algorithms/fedsa-lora.md.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fedloom.algorithms.fedavg import Averaging
from fedloom.algorithms.fedbn import FedBN
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel

Patterns = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class FedSALoRASettings(Averaging):
    """Keys of ``algorithm`` for FedSA-LoRA."""

    local_parameters: Patterns = Field(
        default=("*lora_B*",),
        min_length=1,
        description="patterns of the names of parameters that stay with a client, in which * stands for any text",
    )
    local: LocalSGD = Field(default=LocalSGD(steps=50), description="training in a round, of all parameters together")
    personalize_epochs: int = Field(
        default=5, ge=0, description="epochs that train these parameters for a client that has none of its own yet"
    )


class FedSALoRA(FedBN):
    """FedAvg of all parameters except those that the settings name."""

    name = "fedsa-lora"
    settings = FedSALoRASettings
    example = {"local_parameters": ["*bias"]}
    needs = ()
    predictors = {"personal": "FedSA-LoRA"}

    def own(self, model: FlatModel, s: FedSALoRASettings) -> tuple[str, ...]:
        """Return the parameters whose names match a pattern: the matrices B by default (lines 2-3)."""
        names = [name for name, _ in model.layout.entries if name not in model.layout.buffers]
        return tuple(name for name in names if any(fnmatchcase(name, one) for one in s.local_parameters))

    def check_model(self, settings: Any, model: FlatModel) -> None:
        """Check that each pattern names parameters of the model, and that other parameters are left to share."""
        super().check_model(settings, model)
        names = [name for name, _ in model.layout.entries if name not in model.layout.buffers]
        for pattern in settings.local_parameters:
            if not any(fnmatchcase(name, pattern) for name in names):
                lora = " (adapters of peft have lora_A and lora_B in their names)" if "lora" in pattern else ""
                self._refuse(settings, names, f"no trained parameter of the model matches {pattern!r}{lora}")
        if len(self.own(model, settings)) == len(names):
            self._refuse(settings, names, "every trained parameter stays with its client, so nothing would be shared")

    def _refuse(self, settings: FedSALoRASettings, names: list[str], reason: str) -> None:
        listing = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        raise ExperimentError(
            f"algorithm.local_parameters: {reason}. The trained parameters are {listing}; choose other patterns.",
            key="algorithm.local_parameters",
            found=list(settings.local_parameters),
            allowed=names,
        )


FEDSA_LORA = FedSALoRA()
