"""Same FedAvg with Flower's ``start_server`` and ``start_client``: processes and gRPC streams that last the whole run.

    python -m flower_app.lasting server|client-N HOST:PORT RUN_CONFIG

Flower has deprecated both since 1.13 in favour of SuperLink and SuperNode. They are its only way over gRPC without a
new process for every message and without polling.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from flwr.client import NumPyClient, start_client
from flwr.common import NDArrays, Scalar, ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

from flower_app.task import LeNet, shard, train, visit_generator, write_figures


def arrays(net: LeNet) -> NDArrays:
    """Return copies of the model's parameters, which SGD updates in place."""
    return [value.numpy().copy() for value in net.state_dict().values()]


def load(net: LeNet, values: NDArrays) -> LeNet:
    """Set the model's parameters."""
    net.load_state_dict(dict(zip(net.state_dict(), map(torch.tensor, values), strict=True)))
    return net


class Client(NumPyClient):
    """Client that keeps its data in memory."""

    def __init__(self, config: dict[str, Any], number: int) -> None:
        self._config = config
        self._number = number
        self._data = shard(config["folder"], number)

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train in one visit."""
        net = load(LeNet(), parameters)
        generator = visit_generator(self._config["seed"], int(config["round"]), self._number)
        loss = train(net, self._data["train_x"], self._data["train_y"], self._config, generator)
        return arrays(net), len(self._data["train_x"]), {"train_loss": loss}


def serve(address: str, config: dict[str, Any]) -> None:
    """Run the rounds."""
    clients, ends = config["clients"], []
    net = LeNet()

    def note(number: int, parameters: NDArrays, _: dict[str, Scalar]) -> None:
        """Record the time; called by Flower before the first round and after each."""
        ends.append(time.time())
        load(net, parameters)

    torch.manual_seed(config["seed"])
    strategy = FedAvg(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        evaluate_fn=note,
        on_fit_config_fn=lambda number: {"round": number},
        initial_parameters=ndarrays_to_parameters(arrays(LeNet())),
    )
    start_server(server_address=address, config=ServerConfig(num_rounds=config["rounds"]), strategy=strategy)
    write_figures(net, config["folder"], clients, ends)


if __name__ == "__main__":
    role, place, run_config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if role == "server":
        serve(place, run_config)
    else:
        client = Client(run_config, int(role.removeprefix("client-")))
        start_client(server_address=place, client=client.to_client(), insecure=True)
