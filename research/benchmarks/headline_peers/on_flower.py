"""Flower's simulation (Ray) for a task of research/benchmarks/headline.py: python on_flower.py SETTINGS.json."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from task import MODELS, Data, epoch, write_figures

SETTINGS = json.loads(Path(os.environ["HEADLINE_SETTINGS"]).read_text())
client_app, server_app = ClientApp(), ServerApp()


@cache
def data() -> Data:
    """Return the data, read once per process."""
    torch.set_num_threads(1)
    return Data(Path(SETTINGS["folder"]))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train in one visit."""
    x, y = data().client(int(context.node_config["partition-id"]))
    model = MODELS[SETTINGS["model"]]()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = epoch(model, x, y, SETTINGS["batch_size"], SETTINGS["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    ends: list[float] = []

    def note(number: int, arrays: ArrayRecord) -> MetricRecord:
        """Record the time; called before the first round and after each."""
        ends.append(time.time())
        return MetricRecord()

    torch.manual_seed(SETTINGS["seed"])
    model, clients = MODELS[SETTINGS["model"]](), len(data())
    strategy = FedAvg(
        fraction_train=SETTINGS["cohort"] / clients,
        fraction_evaluate=0.0,
        min_train_nodes=SETTINGS["cohort"],
        min_available_nodes=clients,
    )
    found = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=SETTINGS["rounds"],
        train_config=ConfigRecord(),
        evaluate_fn=note,
    )
    model.load_state_dict(found.arrays.to_torch_state_dict())
    write_figures(SETTINGS, model, data(), ends)


def run() -> None:
    """Run the simulation."""
    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(data()),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": os.cpu_count() or 1, "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    import on_flower  # under the name that Ray's processes import

    on_flower.run()
    sys.exit(not Path(SETTINGS["out"]).exists())
