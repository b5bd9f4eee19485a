"""Cost of a client's step when clients train together on a CPU, relative to one by one.

    .venv/bin/python research/benchmarks/stacked_steps.py [--models logistic mlp lenet] [--repetitions 7]

50 clients with 50 images 1x28x28 each make an epoch of SGD in batches of 10, in groups of 1, 10 and 50 that take turns:
one thread, CPU seconds, medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import describe, machine, table

from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP, LeNet

IMAGE, CLASSES, CLIENTS, EXAMPLES = (1, 28, 28), 10, 50, 50
SGD = LocalSGD(epochs=1, batch_size=10, lr=0.03, momentum=0.0)
GROUPS = (1, 10, 50)
MODELS: dict[str, FlatModel] = {
    "logistic": MLP(IMAGE, [], CLASSES),
    "mlp": MLP(IMAGE, [100], CLASSES),
    "lenet": LeNet(IMAGE, CLASSES),
}


def made_up_clients() -> list[ClientData]:
    """Return clients with random images."""
    random, found = torch.Generator().manual_seed(1), []
    for i in range(CLIENTS):
        x = torch.randn(EXAMPLES, *IMAGE, generator=random)
        split = Split(x, torch.randint(CLASSES, (EXAMPLES,), generator=random))
        found.append(ClientData(f"client-{i:04d}", split, split, split, CLASSES))
    return found


def seconds(model: FlatModel, clients: Sequence[ClientData], together: int) -> float:
    """Return the CPU seconds that the visits of all clients take in groups of this size."""
    theta, started = model.init(torch.Generator().manual_seed(0)), time.process_time()
    for i in range(0, len(clients), together):
        part = clients[i : i + together]
        group = ClientGroup(part, lambda client, purpose: generator(1, purpose, client, 1), round=1)
        train(model, group, theta.expand(len(part), -1), SGD)
    return time.process_time() - started


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", choices=list(MODELS), nargs="*", default=list(MODELS))
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe(machine()), end="\n\n")
    clients, rows = made_up_clients(), []
    for name in options.models:
        found: dict[int, list[float]] = {g: [] for g in GROUPS}
        for _ in range(options.repetitions + 1):
            for g in GROUPS:
                found[g].append(seconds(MODELS[name], clients, g))
        steps = CLIENTS * EXAMPLES // SGD.batch_size
        each = {g: 1e6 * statistics.median(times[1:]) / steps for g, times in found.items()}
        rows.append([name, *(f"{each[g]:.0f} ({each[1] / each[g]:.2f})" for g in GROUPS)])
    print(table(["", *(f"groups of {g}" for g in GROUPS)], rows))
    print("\nCPU µs of a client's step, and how many times as fast as one by one")


if __name__ == "__main__":
    main()
