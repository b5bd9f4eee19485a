"""pfl's simulation, alone or under torchrun, for a task of headline.py: python on_pfl.py SETTINGS.json."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import get_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import MODELS, Data, write_figures


class Ends(TrainingProcessCallback):
    """Callback that records when the rounds begin and end."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Record the time before the first round."""
        self.at.append(time.time())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int) -> tuple:
        """Record the time after a round."""
        self.at.append(time.time())
        return False, Metrics()


def main() -> None:
    """Run the rounds."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(settings["seed"])
    np.random.seed(settings["seed"])  # noqa: NPY002 - pfl draws its users from it
    data = Data(Path(settings["folder"]))
    users = [data.client(i) for i in range(len(data))]
    module = MODELS[settings["model"]]()
    module.loss = lambda x, y, eval=False: F.cross_entropy(module(x), y)
    module.metrics = lambda x, y, eval=True: {"loss": Weighted(F.cross_entropy(module(x), y).item() * len(x), len(x))}
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    dataset = FederatedDataset.from_slices(users, get_user_sampler("random", range(len(users))))
    ends = Ends()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=settings["rounds"],
            evaluation_frequency=10 * settings["rounds"],
            train_cohort_size=settings["cohort"],
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=settings["lr"], local_num_epochs=1, local_batch_size=settings["batch_size"]
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[ends],
    )
    if get_ops().distributed.global_rank == 0:
        write_figures(settings, module, data, ends.at)


if __name__ == "__main__":
    main()
