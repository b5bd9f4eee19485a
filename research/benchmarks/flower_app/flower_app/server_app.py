"""Server: Flower's own FedAvg over all clients without federated evaluation; it records when rounds end."""

from __future__ import annotations

import time

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_app.task import LeNet, write_figures

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    clients, rounds = int(config["clients"]), int(config["rounds"])
    ends: list[float] = []

    def note(number: int, arrays: ArrayRecord) -> MetricRecord:
        """Record the time; called by Flower before the first round and after each."""
        ends.append(time.time())
        return MetricRecord()

    torch.manual_seed(int(config["seed"]))
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(LeNet().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord(),
        evaluate_fn=note,
    )
    net = LeNet()
    net.load_state_dict(result.arrays.to_torch_state_dict())
    write_figures(net, str(config["folder"]), clients, ends)
