"""TR-MAML: Per-FedAvg for the worst mixture of clients.

L. Collins, A. Mokhtari, S. Shakkottai, Task-robust model-agnostic meta-learning, NeurIPS 2020, arXiv 2002.04766,
Algorithm 1, as papers/002 uses it in a federation. min_w max_p Σ p_i F_i(w), F_i(w) = f_i(w - α∇f_i(w)), p on the
simplex. Clients are those of Per-FedAvg; the server weights them, and updates the weights, as in AFL.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from fedloom.algorithms.afl import WeightedServer
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.per_fedavg import MetaLearning, PerFedAvg
from fedloom.algorithms.sums import SummedFields


class TRMAMLSettings(MetaLearning):
    """Keys of ``algorithm`` for TR-MAML, equal to Per-FedAvg's, except that p weights the clients."""

    server_lr: float = Field(default=1.0, gt=0, description="factor on the average update")
    weights_lr: float = Field(
        default=0.08, ge=0, le=1e6, description="step size of the clients' weights p; 0 keeps them equal"
    )
    inner_lr: float = Field(default=0.05, ge=0, description="α, rate of the inner step and of personalization")
    local: LocalSGD = Field(default=LocalSGD(steps=5, lr=0.1, momentum=0.0), description="SGD on F_i")


class TRMAML(PerFedAvg):
    """Per-FedAvg for the worst mixture of clients."""

    name = "tr-maml"
    settings = TRMAMLSettings
    example = {"weights_lr": 0.2, "personalize_steps": 1}
    server_class = WeightedServer
    no_sums = "weights each client's own update at the server; drfa draws clients by such weights instead"
    predictors = {"personal": "TR-MAML", "global": "TR-MAML, shared model"}
    roster_data = "a weight of each client"
    no_example_privacy = (
        "The gradient after an inner step depends on two batches together, and clients are weighted by their "
        "losses, which have no noise."
    )

    def sums(self, settings: Any) -> SummedFields:
        """Return none: the server weights each update."""
        return {}


TR_MAML = TRMAML()
