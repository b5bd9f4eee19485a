"""TR-MAML: Per-FedAvg for the worst mixture of clients.

L. Collins, A. Mokhtari, S. Shakkottai, Task-robust model-agnostic meta-learning, NeurIPS 2020, arXiv 2002.04766,
Algorithm 1, as papers/002 uses it in a federation. min_w max_p Σ p_i F_i(w), F_i(w) = f_i(w - α∇f_i(w)), p on the
simplex. Clients are those of Per-FedAvg; the server weights them, and updates the weights, as in AFL.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fedloom.algorithms.afl import CLIENTS_BEFOREHAND, WeightedServer
from fedloom.algorithms.client import LocalSGD
from fedloom.algorithms.per_fedavg import PerFedAvgSettings, adapted, meta_sgd
from fedloom.algorithms.recipe import shared_model


class TRMAMLSettings(PerFedAvgSettings):
    """Keys of ``algorithm`` for TR-MAML: those of Per-FedAvg and ``weights_lr``."""

    weights_lr: float = Field(
        default=0.08, ge=0, le=1e6, description="step size of the clients' weights p; 0 keeps them equal"
    )
    weighting: Literal["examples", "uniform"] = Field(default="uniform", description="uniform: p alone weights clients")
    max_norm: None = Field(default=None, description="null: p, which follows what clients say of losses, has no bound")
    trim: Literal[0] = Field(default=0, description="0: p weights clients")
    inner_lr: float = Field(default=0.05, ge=0, description="α, rate of the inner step and of personalization")
    local: LocalSGD = Field(default=LocalSGD(steps=5, lr=0.1, momentum=0.0), description="SGD on F_i")

    @model_validator(mode="after")
    def _weighted_by_p(self) -> Self:
        if self.weighting != "uniform":
            raise ValueError(f"weighting: found {self.weighting}; allowed: uniform, since p weights the clients")
        return self


TR_MAML = shared_model(
    "tr-maml",
    TRMAMLSettings,
    local=meta_sgd,
    personalize=adapted,
    steps=lambda s, examples: 0 if s.adaptation is None else s.personalize_steps,
    server=WeightedServer,
    by_batch=False,
    titles={"personal": "TR-MAML", "global": "TR-MAML, shared model"},
    requires_fixed_population=lambda settings: CLIENTS_BEFOREHAND,
)
